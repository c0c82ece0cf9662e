package peers

import "errors"

var (
	// ErrConfig refuses a configuration.
	ErrConfig = errors.New("peers: bad configuration")
	// ErrListen means that the address cannot be listened on.
	ErrListen = errors.New("peers.listen")
	// ErrAway means that a peer did not answer, or not in time, or is left alone. It speaks of no bytes.
	ErrAway = errors.New("peers: no answer")
	// errSilent is of a read: who does not answer for so long will not answer the next one.
	errSilent = errors.New("no byte")
	// ErrMessage means that a peer has sent what the protocol does not allow.
	ErrMessage = errors.New("peers: a message that is none")
	// errNoWay means that UCX cannot read a peer's memory, and says what that takes.
	errNoWay = errors.New("that host's memory is not read, which takes InfiniBand or RoCE, or on one machine the right to trace its process " +
		"(kernel.yama.ptrace_scope=0): TCP is no way")
	// ErrPlaintext refuses to speak without TLS to an address that is not loopback.
	ErrPlaintext = errors.New("peers: without peers.cert, key and ca only loopback addresses are spoken to")
)
