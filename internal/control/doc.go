// Package control moves the control messages of SGLang's disaggregation protocol: multipart
// messages over ZMQ, from PUSH sockets to one PULL socket per rank. It does not look into
// frames; package wire does. This is the only package that uses libzmq, and it needs cgo;
// without cgo, or on another system than Linux, New fails with an error that says so.
//
// # One socket is one connection
//
// libzmq reconnects silently, and keeps messages across a reconnect for whatever process then
// listens at the address. Here that would be harmful: a restarted prefill has lost the
// registration, and what was meant for the old process poisons rooms of the new one. So a
// PUSH socket lives exactly as long as its connection (RECONNECT_IVL -1, as SGLang's prefill
// sets it) and takes messages only while there is one (IMMEDIATE 1). Every established
// connection has a generation, a number that only rises within one Control. Where a message is:
//
//   - Without a connection it waits here, not in libzmq, until one is established or its
//     deadline passes. Connecting is retried meanwhile, with backoff.
//   - Behind a peer that does not read it waits here as well, in order, until there is room.
//   - Once libzmq has taken it for a connection it counts as sent. It is lost if that
//     connection ends first; the loss is then an Event. Nothing here knows what the peer read.
//   - When a connection ends, what still waits for that peer fails with ErrPeerLost and is
//     not kept for the next connection. A Message can also name the generation that it is
//     meant for.
//
// # Goroutines
//
// A Control runs four goroutines, however many peers it has, besides libzmq's own two threads:
// the receiver owns the PULL socket and calls the handler; the gate owns that socket's monitor,
// and where not everybody may connect answers libzmq's question who may; the sender owns every
// PUSH socket and its monitor; the notifier calls what may block: completion callbacks and the
// observer. ZMQ sockets are not safe for concurrent use, so nothing else touches one. The owners do not
// sit in zmq_poll, which costs a system call for every socket whenever one is ready: they watch
// the descriptors behind the sockets (ZMQ_FD) with epoll, next to an eventfd that wakes them.
//
// # Who was refused
//
// libzmq refuses a peer in the handshake, and what is known of it then depends on the side and the
// reason (libzmq 4.3.4). Where the gate says no, to a network or to a client's CURVE key, both sides
// are told. Where one side alone has CURVE both see it, but for the one that the other was quicker
// to hang up on. A client that was given another server key
// is refused by libzmq itself: the listening side sees that a message could not be decrypted, the
// client only that the connection was closed. What speaks no ZMTP 3 is seen at the listening side
// alone. Stats counts all of these there; Trouble, and the errors of messages that are not sent for
// it, say it at the other.
//
// # What libzmq does not bound
//
// A frame over Limits.FrameBytes ends its connection before it is read. A message over the
// limits on frames or bytes is dropped whole, but only once it is complete: libzmq counts whole
// messages against its high-water mark, so a peer that never ends a message makes it grow. It
// also accepts any number of connections. And it reads ZMTP 1.0, which has no
// handshake worth the name: any bytes that a TCP client sends can arrive as frames. The PULL
// port must be reachable by the workers of the deployment only, or use Allowed or Curve: with
// either, all this holds for those alone that have passed the handshake, of ZMTP 3.
package control
