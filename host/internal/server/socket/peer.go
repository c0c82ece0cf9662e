package socket

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	"github.com/kvhost/kvhost/host/internal/budget"
	"github.com/kvhost/kvhost/host/internal/budget/arrivals"
)

// Peer is the process at the other end of a connection, as reported by the kernel.
type Peer struct {
	credentials.CommonAuthInfo
	PID    int32
	UID    uint32
	Groups []uint32 // primary group, followed by the supplementary groups

	arriving *arrivals.Conn
}

// Stream charges the peer's connection for an event stream. The caller must call over at its end.
func (p Peer) Stream() (over func(), err error) {
	if p.arriving == nil { // a call by the host itself
		return func() {}, nil
	}
	if err := p.arriving.Holder().Stream(); err != nil {
		return nil, err
	}
	return p.arriving.Holder().StreamOver, nil
}

// Answer charges the peer's connection for an answer of size bytes until the answer is written.
func (p Peer) Answer(size int) error {
	if p.arriving == nil { // a call by the host itself
		return nil
	}
	return p.arriving.Answer(int64(size))
}

// AuthType implements [credentials.AuthInfo].
func (Peer) AuthType() string { return "unix" }

// Operator reports whether the peer runs as root or as the host's own user.
func (p Peer) Operator() bool { return p.UID == 0 || p.UID == uint32(os.Geteuid()) }

// Users are the users and groups that may connect, in addition to root and the host's own user.
type Users struct {
	UIDs, GIDs []uint32
}

// None reports whether there are no such users and groups.
func (u *Users) None() bool { return len(u.UIDs) == 0 && len(u.GIDs) == 0 }

// Allow reports whether a peer may connect.
func (u *Users) Allow(p Peer) bool {
	return p.Operator() || slices.Contains(u.UIDs, p.UID) ||
		slices.ContainsFunc(p.Groups, func(g uint32) bool { return slices.Contains(u.GIDs, g) })
}

// peerOf asks the kernel for the peer of a connection.
func peerOf(c *net.UnixConn) (p Peer, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return p, err
	}
	var cred *unix.Ucred
	var got error
	if err := raw.Control(func(fd uintptr) {
		if cred, got = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); got == nil {
			p.Groups, got = peerGroups(int(fd))
		}
	}); err != nil {
		return p, err
	}
	if got != nil {
		return p, got
	}
	p.PID, p.UID, p.Groups = cred.Pid, cred.Uid, append([]uint32{cred.Gid}, p.Groups...)
	return p, nil
}

// peerGroups returns the supplementary groups of the peer. It returns none if the kernel lacks SO_PEERGROUPS.
func peerGroups(fd int) ([]uint32, error) {
	for size := uint32(4 * 64); ; {
		buf := make([]byte, size)
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_PEERGROUPS,
			uintptr(unsafe.Pointer(&buf[0])), uintptr(unsafe.Pointer(&size)), 0)
		switch {
		case errno == unix.ERANGE && int(size) > len(buf):
			continue // the kernel has set size to the required size
		case errno == unix.ENOPROTOOPT:
			return nil, nil
		case errno != 0:
			return nil, fmt.Errorf("getsockopt SO_PEERGROUPS: %w", errno)
		}
		var groups []uint32
		for buf = buf[:size]; len(buf) >= 4; buf = buf[4:] {
			groups = append(groups, binary.NativeEndian.Uint32(buf))
		}
		return groups, nil
	}
}

// Arriving bounds the memory that a connection may occupy before a handler takes its data, and the processor time that each
// process takes with what no session gets. All processes of a user together have twice the part of one.
type Arriving struct {
	Budget *budget.Budget
	Effort *arrivals.Effort
	Closed func(error) // called with the reason when a connection is closed
}

// Options returns options for a gRPC server on a [Listener]. They set the AuthInfo of each call to its [Peer], and bound the
// data that arrives.
func (a Arriving) Options() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.Creds(peerCredentials{a}), grpc.StatsHandler(arrivals.Calls(connection)),
		grpc.MaxHeaderListSize(maxHeader), grpc.MaxConcurrentStreams(connStreams),
		grpc.ConnectionTimeout(silence), grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionIdle: silence}),
	}
}

const (
	maxHeader   = 64 << 10
	connStreams = 8                // most concurrent calls of a connection; each may have an answer that the client does not read
	silence     = 30 * time.Second // longest time without a call

	acceptEffort = 30 * time.Microsecond  // estimate for a connection until it sends something
	beginEffort  = 150 * time.Microsecond // estimate for what follows, until its first call
	byteEffort   = 15 * time.Nanosecond   // estimate for a byte of a message, which may be decoded to many small elements
)

type peerCredentials struct{ Arriving }

func (a peerCredentials) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	u, ok := c.(*net.UnixConn)
	if !ok {
		return nil, nil, fmt.Errorf("%w: a connection of %T has no peer", ErrPath, c)
	}
	p, err := peerOf(u)
	if err != nil {
		return nil, nil, err
	}
	p.CommonAuthInfo = credentials.CommonAuthInfo{SecurityLevel: credentials.NoSecurity}
	user := p.UID
	if p.Operator() {
		user = 0
	}
	holder, err := a.Budget.Join(fmt.Sprintf("connection of process %d", p.PID), user)
	if err != nil {
		a.Closed(err)
		return nil, nil, err
	}
	p.arriving = arrivals.New(c, holder, 0, a.Closed)
	who := arrivals.Sender{ID: fmt.Sprint("process ", p.PID), Crowd: fmt.Sprint("user ", p.UID)}
	p.arriving.Pace(a.Effort, byteEffort, func() arrivals.Sender { return who })
	if err := heard(u); err != nil {
		p.arriving.Close()
		return nil, nil, err
	}
	a.Effort.Spend(context.Background(), who, beginEffort)
	return p.arriving, p, nil
}

// heard waits until a client has sent something, because gRPC prepares much for a connection, and a client can open many.
func heard(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var n int
	var got error
	if err := raw.Read(func(fd uintptr) bool {
		n, _, got = unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK)
		return !errors.Is(got, unix.EAGAIN)
	}); err != nil {
		return err
	}
	if n == 0 && got == nil {
		return io.EOF
	}
	return got
}

// connection returns the connection of a call, or nil for a call by the host itself.
func connection(info credentials.AuthInfo) *arrivals.Conn {
	p, _ := info.(Peer)
	return p.arriving
}

func (peerCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.ErrUnsupported
}

func (peerCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "unix"}
}

func (c peerCredentials) Clone() credentials.TransportCredentials { return c }

func (peerCredentials) OverrideServerName(string) error { return errors.ErrUnsupported }
