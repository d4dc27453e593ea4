"""A pyzmq peer for the interop tests, with the socket options of SGLang's own sockets.

pull [PUBLIC SECRET]           bind a PULL socket, print its port, then every message as JSON
push ENDPOINT [SERVER PUBLIC SECRET]
                               send every line of standard input, a JSON list of hex frames

Both end with standard input.
"""

import json
import sys
import threading

import zmq


def pull(ctx, keys):
    sock = ctx.socket(zmq.PULL)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    if keys:
        sock.curve_server = True
        sock.curve_publickey, sock.curve_secretkey = keys
    print(sock.bind_to_random_port("tcp://127.0.0.1"), flush=True)

    def receive():
        while True:
            frames = sock.recv_multipart()
            print(json.dumps([f.hex() for f in frames]), flush=True)

    threading.Thread(target=receive, daemon=True).start()
    sys.stdin.read()


def push(ctx, endpoint, keys):
    sock = ctx.socket(zmq.PUSH)
    if keys:
        sock.curve_serverkey, sock.curve_publickey, sock.curve_secretkey = keys
    if "[" in endpoint:
        sock.setsockopt(zmq.IPV6, 1)
    sock.setsockopt(zmq.RECONNECT_IVL, -1)
    sock.setsockopt(zmq.SNDTIMEO, 30000)
    sock.setsockopt(zmq.LINGER, 30000)  # SGLang: 0, and it stays alive
    sock.setsockopt(zmq.TCP_KEEPALIVE, 1)
    sock.connect(endpoint)
    for line in sys.stdin:
        sock.send_multipart([bytes.fromhex(f) for f in json.loads(line)])
    sock.close()


def main():
    ctx = zmq.Context()
    mode, args = sys.argv[1], sys.argv[2:]
    if mode == "pull":
        pull(ctx, [k.encode() for k in args])
        sys.stdout.flush()
        # The receiving thread is in a socket; leave without it.
        import os

        os._exit(0)
    push(ctx, args[0], [k.encode() for k in args[1:]])
    ctx.term()


main()
