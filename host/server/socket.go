package server

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/proto"
)

// maxSocketPath is what a Unix address holds, less the descriptor socket's suffix.
const maxSocketPath = 107 - len(proto.DescriptorSuffix)

// sockets are the two listening sockets of a server and the lock that makes their path its own.
type sockets struct {
	path     string
	lock     *os.File
	session  *peerListener
	transfer *peerListener // descriptors
}

// listen claims path and makes both sockets. Sockets that a dead host left behind are removed; live ones are refused.
func listen(path string, log *slog.Logger) (*sockets, error) {
	if err := checkDirectory(path, log); err != nil {
		return nil, err
	}
	lock, err := claim(path + ".lock")
	if err != nil {
		return nil, err
	}
	s := &sockets{path: path, lock: lock}
	if s.session, err = listenUnix(path, log); err == nil {
		s.transfer, err = listenUnix(path+proto.DescriptorSuffix, log)
	}
	if err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// Close closes the sockets and removes them and the lock.
func (s *sockets) Close() {
	for _, l := range []*peerListener{s.session, s.transfer} {
		if l != nil {
			l.Close()
			os.Remove(l.path)
		}
	}
	os.Remove(s.lock.Name()) // while it is held: see claim
	s.lock.Close()
}

func checkDirectory(path string, log *slog.Logger) error {
	if path == "" || len(path) > maxSocketPath {
		return fmt.Errorf(
			"%w: path %q has %d bytes, a Unix socket's path here has 1 to %d",
			ErrSocket,
			path,
			len(path),
			maxSocketPath,
		)
	}
	dir := filepath.Dir(path)
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf(
			"%w: %s: directory %s does not exist; make it with: mkdir -m 0700 %s",
			ErrSocket,
			path,
			dir,
			dir,
		)
	case err != nil:
		return fmt.Errorf("%w: %s: %w", ErrSocket, path, err)
	case !info.IsDir():
		return fmt.Errorf("%w: %s: %s is not a directory", ErrSocket, path, dir)
	case info.Mode()&0o002 != 0 && info.Mode()&os.ModeSticky == 0:
		log.Warn("anybody can replace the socket: its directory is writable for all and not sticky", "directory", dir)
	}
	return nil
}

// claim locks a file for the life of the server. A host removes the file while it still holds the lock, so a lock
// counts only when the path still names the locked file.
func claim(path string) (*os.File, error) {
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrSocket, err)
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, fmt.Errorf("%w: another host holds %s", ErrSocketInUse, path)
			}
			return nil, fmt.Errorf("%w: lock %s: %w", ErrSocket, path, err)
		}
		held, err := f.Stat()
		if err == nil {
			if named, err := os.Stat(path); err == nil && os.SameFile(held, named) {
				return f, nil
			}
		}
		f.Close()
	}
}

func listenUnix(path string, log *slog.Logger) (*peerListener, error) {
	switch info, err := os.Lstat(path); {
	case errors.Is(err, os.ErrNotExist):
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrSocket, err)
	case info.Mode().Type() != os.ModeSocket:
		return nil, fmt.Errorf("%w: %s exists and is not a socket", ErrSocket, path)
	default:
		if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
			c.Close()
			return nil, fmt.Errorf("%w: a process answers on %s", ErrSocketInUse, path)
		} else if !errors.Is(err, unix.ECONNREFUSED) {
			return nil, fmt.Errorf("%w: %s: %w", ErrSocketInUse, path, err)
		}
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("%w: stale socket: %w", ErrSocket, err)
		}
		log.Info("removed a stale socket", "path", path)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrSocket, err)
	}
	l.SetUnlinkOnClose(false) // Close removes it under the lock
	// Between bind and chmod the peer check below is what keeps others out.
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		os.Remove(path)
		return nil, fmt.Errorf("%w: %w", ErrSocket, err)
	}
	return &peerListener{UnixListener: l, path: path, log: log, peer: peerUID}, nil
}

// peerListener accepts connections of this process' own user and of root only.
type peerListener struct {
	*net.UnixListener
	path string
	log  *slog.Logger
	peer func(*net.UnixConn) (uint32, error) // peerUID, except in tests
}

// Accept closes connections of other users and waits for the next.
func (l *peerListener) Accept() (net.Conn, error) { return l.AcceptPeer() }

// AcceptPeer is Accept for callers that need the Unix connection.
func (l *peerListener) AcceptPeer() (*net.UnixConn, error) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			return nil, err
		}
		uid, err := l.peer(c)
		if err == nil && (uid == 0 || uid == uint32(os.Geteuid())) {
			return c, nil
		}
		l.log.Warn("refused a connection of another user", "socket", l.path, "uid", uid, "error", err)
		c.Close()
	}
}

func peerUID(c *net.UnixConn) (uint32, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var got error
	if err := raw.Control(func(fd uintptr) {
		cred, got = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return 0, err
	}
	if got != nil {
		return 0, got
	}
	return cred.Uid, nil
}
