package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"
)

// dial connects to a socket of the host. It refuses a socket of a user that may not be the host.
func (h *Hello) dial(ctx context.Context, path string) (*net.UnixConn, error) {
	nc, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	c := nc.(*net.UnixConn)
	if err := h.trusts(c, path); err != nil {
		_ = c.Close() // an error has no consequence: nothing was sent
		return nil, err
	}
	return c, nil
}

// trusts checks the user that listens on the socket, as reported by the kernel. The host may run as root, as this process's user, as a user
// in HostUsers, or as a user to whom root has given the socket's directory.
func (h *Hello) trusts(c *net.UnixConn, path string) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var cred *unix.Ucred
	if e := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); e != nil || err != nil {
		return fmt.Errorf("%w: %s: the kernel does not say who answers: %w", ErrForeign, path, errors.Join(e, err))
	}
	if cred.Uid == 0 || cred.Uid == uint32(os.Geteuid()) || slices.Contains(h.HostUsers, cred.Uid) || given(filepath.Dir(path), cred.Uid) {
		return nil
	}
	return fmt.Errorf("%w: %s: user %d, who is neither root nor user %d: if that is the host's user, name it in Hello.HostUsers", ErrForeign, path,
		cred.Uid, os.Geteuid())
}

// given reports whether root has given a directory to a user and no other user can write to it.
func given(dir string, uid uint32) bool {
	at, err := filepath.Abs(dir)
	if err == nil {
		at, err = filepath.EvalSymlinks(at)
	}
	for owner := uid; err == nil; at, owner = filepath.Dir(at), 0 {
		info, e := os.Stat(at)
		if err = e; err != nil {
			break
		}
		shared := info.Mode()&0o022 != 0 && (owner != 0 || info.Mode()&os.ModeSticky == 0)
		if info.Sys().(*syscall.Stat_t).Uid != owner || shared {
			return false
		}
		if at == "/" {
			return owner == 0
		}
	}
	return false
}
