package health

import (
	"errors"
	"io/fs"
	"slices"

	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

// Condition classifies the error of a file operation. [Judge] decides it for the whole store. A table in host/docs/design.md
// lists the consequences of each condition for the operation, the piece, the root and the host.
type Condition uint8

// Conditions of a file operation.
const (
	Other      Condition = iota // an error in the bytes of a file, or an unknown error
	Gone                        // no file has the name
	Shortage                    // the process is short of a resource; this is temporary, and nothing was begun
	NoRoom                      // the file system has no space; nothing was begun
	Protected                   // the file system is read-only; nothing was begun
	Refused                     // the file or the process lacks a permission; nothing was begun
	Device                      // the device under the file system, or the way to it, failed
	Unanswered                  // there was no answer, or the root is out of service
)

// errnos lists the error numbers of each condition.
var errnos = map[Condition][]unix.Errno{
	Gone:      {unix.ENOENT, unix.ENOTDIR, unix.EISDIR, unix.ESTALE},
	Shortage:  {unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.ENOBUFS, unix.EINTR, unix.EAGAIN},
	NoRoom:    {unix.ENOSPC, unix.EDQUOT},
	Protected: {unix.EROFS},
	Refused:   {unix.EACCES, unix.EPERM},
	Device: {
		unix.EIO, unix.ENXIO, unix.ENODEV, unix.ENOTCONN, unix.ESHUTDOWN, unix.EHOSTDOWN, unix.EREMOTEIO, unix.ETIMEDOUT,
		unix.EUCLEAN, unix.EBUSY, unix.ECONNABORTED, unix.ECONNRESET, unix.ECONNREFUSED, unix.EHOSTUNREACH, unix.ENETDOWN,
		unix.ENETUNREACH, unix.ENOLINK, // network file systems, and file systems with a process that has ended
	},
}

// Judge returns the condition of an error.
func Judge(err error) Condition {
	if errors.Is(err, staging.ErrHung) || errors.Is(err, ErrOut) {
		return Unanswered
	}
	if errors.Is(err, fs.ErrNotExist) {
		return Gone
	}
	if errno, ok := errors.AsType[unix.Errno](err); ok {
		for c, list := range errnos {
			if slices.Contains(list, errno) {
				return c
			}
		}
	}
	return Other
}

// MayBeOneFile reports whether the error may concern a single file, and not the whole root.
func (c Condition) MayBeOneFile() bool { return c == Gone || c == Refused || c == Device }

// Untouched reports whether an operation with such an error has changed nothing.
func (c Condition) Untouched() bool { return c >= Shortage && c <= Refused }
