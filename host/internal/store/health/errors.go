package health

import (
	"errors"

	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

var (
	// ErrOut says that a root is out of service.
	ErrOut = errors.New("store: root is out of service")
	// ErrProbe says that a probe read back other bytes than it wrote.
	ErrProbe = errors.New("store: a probe reads back as something else")
	// ErrNoParent says that the directory in which a root is to be made is missing.
	ErrNoParent = errors.New("its parent directory does not exist")
	// ErrNotMounted says that a root is on the file system of /, which its require_mount forbids.
	ErrNotMounted = errors.New("it is on the file system of /")
)

// Hung says that an operation gave no answer within its limit.
func Hung(err error) bool { return errors.Is(err, staging.ErrHung) }

// NoSpace says that a file system, or what it lets this user take of it, is full.
func NoSpace(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

// ofDevice says that an error is of what is under the file system, or of the way to it.
func ofDevice(err error) bool {
	for _, e := range [...]unix.Errno{
		unix.EIO, unix.ENXIO, unix.ENODEV, unix.ENOTCONN, unix.ESHUTDOWN, unix.EHOSTDOWN, unix.EREMOTEIO,
		unix.ETIMEDOUT, unix.EUCLEAN,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
