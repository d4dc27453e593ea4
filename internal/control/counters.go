//go:build linux && cgo

package control

import "sync/atomic"

// counters are the running totals behind Stats.
type counters struct {
	messagesIn, bytesIn, messagesOut, bytesOut                                atomic.Uint64
	droppedFrames, droppedBytes, receiveErrors, panics                        atomic.Uint64
	sendsExpired, sendsCancelled, sendsLost, sendsRefused, sendsClosed        atomic.Uint64
	connects, disconnects, connectFailures, handshakeFailed                   atomic.Uint64
	peersRefused, handshakesRefused, handshakesCut                            atomic.Uint64
	refused                                                                   refusedSources
	endpoints, connected, blocked, pending, pendingBytes, strangers, incoming atomic.Int64
}

func (c *counters) snapshot() Stats {
	return Stats{
		MessagesIn: c.messagesIn.Load(), BytesIn: c.bytesIn.Load(),
		MessagesOut: c.messagesOut.Load(), BytesOut: c.bytesOut.Load(),
		DroppedFrames: c.droppedFrames.Load(), DroppedBytes: c.droppedBytes.Load(),
		ReceiveErrors: c.receiveErrors.Load(), Panics: c.panics.Load(),
		SendsExpired: c.sendsExpired.Load(), SendsCancelled: c.sendsCancelled.Load(),
		SendsLost: c.sendsLost.Load(), SendsRefused: c.sendsRefused.Load(), SendsClosed: c.sendsClosed.Load(),
		Connects: c.connects.Load(), Disconnects: c.disconnects.Load(),
		ConnectFailures: c.connectFailures.Load(), HandshakeFailed: c.handshakeFailed.Load(),
		PeersRefused: c.peersRefused.Load(), HandshakesRefused: c.handshakesRefused.Load(), HandshakesCut: c.handshakesCut.Load(),
		Endpoints: int(c.endpoints.Load()), Connected: int(c.connected.Load()), Blocked: int(c.blocked.Load()),
		Incoming: int(c.incoming.Load()), Pending: int(c.pending.Load()), PendingBytes: int(c.pendingBytes.Load()),
	}
}
