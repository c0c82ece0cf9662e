package socket

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/host/internal/budget/arrivals"
	"github.com/kvhost/kvhost/host/internal/proto"
)

// maxPath is the longest path of a Unix socket, less the suffix of the descriptor socket.
const maxPath = 107 - len(proto.DescriptorSuffix)

// Pair holds the two listening sockets of a server and the lock on their path.
type Pair struct {
	path        string
	lock        *os.File
	Sessions    *Listener
	Descriptors *Listener
}

// Listen claims the path and creates both sockets for the given users, root and the host's own user. It replaces the sockets of
// a dead process, and fails if a live one has them.
func Listen(path string, users Users, log *slog.Logger) (*Pair, error) {
	if err := Free(path, log); err != nil {
		return nil, err
	}
	lock, err := claim(path + ".lock")
	if err != nil {
		return nil, err
	}
	s := &Pair{path: path, lock: lock}
	if s.Sessions, err = listenUnix(path, users, log); err == nil {
		s.Descriptors, err = listenUnix(path+proto.DescriptorSuffix, users, log)
	}
	if err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// Free returns an error unless a socket can be created at the path now.
func Free(path string, log *slog.Logger) error {
	if err := checkDirectory(path, log); err != nil {
		return err
	}
	if err := unix.Access(filepath.Dir(path), unix.W_OK|unix.X_OK); err != nil {
		return fmt.Errorf("%w: %s: %w; its directory must be writable for the user of kvhost", ErrPath, path, err)
	}
	_, err := stale(path)
	if err == nil {
		_, err = stale(path + proto.DescriptorSuffix)
	}
	return err
}

// SetUsers changes the users that may connect. Existing connections stay open.
func (s *Pair) SetUsers(users Users) error {
	return errors.Join(s.Sessions.setUsers(users), s.Descriptors.setUsers(users))
}

// Close closes the sockets, and removes them and the lock file.
func (s *Pair) Close() {
	for _, l := range []*Listener{s.Sessions, s.Descriptors} {
		if l != nil {
			l.Close()
			os.Remove(l.path)
		}
	}
	os.Remove(s.lock.Name()) // while the lock is held: see claim
	s.lock.Close()
}

func checkDirectory(path string, log *slog.Logger) error {
	if path == "" || len(path) > maxPath {
		return fmt.Errorf("%w: path %q has %d bytes, a Unix socket's path here has 1 to %d", ErrPath, path, len(path),
			maxPath)
	}
	dir := filepath.Dir(path)
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("%w: %s: directory %s does not exist; make it with: mkdir -m 0700 %s", ErrPath, path, dir, dir)
	case err != nil:
		return fmt.Errorf("%w: %s: %w", ErrPath, path, err)
	case !info.IsDir():
		return fmt.Errorf("%w: %s: %s is not a directory", ErrPath, path, dir)
	case info.Mode()&0o022 != 0 && info.Mode()&os.ModeSticky == 0:
		log.Warn("socket can be replaced by other users, who may write to its directory: chmod go-w", "directory", dir)
	}
	return nil
}

// claim locks a file for the lifetime of the server. A server removes the file while it holds the lock. A lock is therefore
// valid only if the path still names the locked file.
func claim(path string) (*os.File, error) {
	for {
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, fmt.Errorf("%w: %w; its directory must be writable for the user of kvhost", ErrPath, err)
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, fmt.Errorf("%w: another host holds %s; another path is --socket", ErrInUse, path)
			}
			return nil, fmt.Errorf("%w: lock %s: %w", ErrPath, path, err)
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

// stale reports whether the path is a socket of a dead process. It returns an error if the path exists and is anything else.
func stale(path string) (bool, error) {
	switch info, err := os.Lstat(path); {
	case errors.Is(err, os.ErrNotExist):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("%w: %w", ErrPath, err)
	case info.Mode().Type() != os.ModeSocket:
		return false, fmt.Errorf("%w: %s exists and is not a socket", ErrPath, path)
	}
	c, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		holder := ""
		if p, err := peerOf(c.(*net.UnixConn)); err == nil {
			holder = fmt.Sprintf(" %d", p.PID)
		}
		c.Close()
		return false, fmt.Errorf("%w: process%s answers on %s; another path is --socket", ErrInUse, holder, path)
	}
	if !errors.Is(err, unix.ECONNREFUSED) {
		return false, fmt.Errorf("%w: %s: %w", ErrInUse, path, err)
	}
	return true, nil
}

func listenUnix(path string, users Users, log *slog.Logger) (*Listener, error) {
	old, err := stale(path)
	if err != nil {
		return nil, err
	}
	if old {
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("%w: stale socket: %w", ErrPath, err)
		}
		log.Info("stale socket removed", "path", path)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrPath, err)
	}
	l.SetUnlinkOnClose(false) // Close removes the socket while the lock is held
	listener := &Listener{UnixListener: l, path: path, log: log, knock: arrivals.NewEffort(), peer: peerOf}
	// Until the mode is set, the check of the peer in Accept keeps other users out.
	if err := listener.setUsers(users); err != nil {
		l.Close()
		os.Remove(path)
		return nil, err
	}
	return listener, nil
}

func (l *Listener) setUsers(users Users) error {
	l.users.Store(&users)
	mode := os.FileMode(0o600)
	if !users.None() {
		mode = 0o666 // any user can connect; Accept checks the peer
	}
	if err := os.Chmod(l.path, mode); err != nil {
		return fmt.Errorf("%w: %w", ErrPath, err)
	}
	return nil
}

// Listener accepts connections of allowed users only.
type Listener struct {
	*net.UnixListener
	path  string
	log   *slog.Logger
	users atomic.Pointer[Users]
	knock *arrivals.Effort
	peer  func(*net.UnixConn) (Peer, error) // peerOf, except in tests
}

// Accept returns the next connection of an allowed user. It closes all others.
func (l *Listener) Accept() (net.Conn, error) {
	c, _, err := l.AcceptPeer()
	if err != nil {
		return nil, err
	}
	return c, nil
}

// AcceptPeer is like Accept and also returns the peer.
func (l *Listener) AcceptPeer() (*net.UnixConn, Peer, error) {
	for {
		c, err := l.AcceptUnix()
		if err != nil {
			return nil, Peer{}, err
		}
		l.knock.Spend(context.Background(), arrivals.Sender{}, acceptEffort)
		p, err := l.peer(c)
		if err == nil && l.users.Load().Allow(p) {
			return c, p, nil
		}
		l.log.Warn("connection of another user refused", "socket", l.path, "uid", p.UID, "error", err)
		c.Close()
	}
}
