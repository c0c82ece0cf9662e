package peers

import "errors"

var (
	// ErrConfig means that the configuration is not valid.
	ErrConfig = errors.New("peers: bad configuration")
	// ErrListen means that the host cannot listen on the configured address.
	ErrListen = errors.New("peers.listen")
	// ErrAway means that a peer gave no answer in time, or that it is left alone for now. It says nothing about the bytes of an
	// entry.
	ErrAway = errors.New("peers: no answer")
	// errSilent means that a read received no byte for too long. One such read is enough to leave the peer alone: the next
	// would end in the same way.
	errSilent = errors.New("no byte")
	// ErrMessage means that a peer sent a message which the protocol does not allow.
	ErrMessage = errors.New("peers: a message that the protocol does not allow")
	// ErrHandshake means that the other side of a connection sends more to prove who it is than any host does.
	ErrHandshake = errors.New("peers: too much in a handshake")
	// errNoWay means that UCX cannot read the peer's memory. Its text names the requirements.
	errNoWay = errors.New("that host's memory is not read, which takes InfiniBand or RoCE, or on one machine the right to trace its process " +
		"(kernel.yama.ptrace_scope=0): TCP is no way")
	// ErrPlaintext means that the address is not a loopback address, and no TLS is configured.
	ErrPlaintext = errors.New("peers: without peers.cert, key and ca only loopback addresses are spoken to")
)
