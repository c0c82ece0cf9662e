package health

import (
	"errors"
	"io/fs"
	"slices"

	"github.com/kvhost/kvhost/staging"
	"golang.org/x/sys/unix"
)

// Condition is what an error of an operation on files speaks of. [Judge] decides it, for the whole store: a table in
// host/docs/design.md says what each means for the operation, the piece, the root and the host.
type Condition uint8

// The conditions.
const (
	Other      Condition = iota // of the bytes, or not known
	Gone                        // of the name: no file has it
	Shortage                    // of the process, which is short of something; it passes, and nothing was begun
	NoRoom                      // of the file system's space; nothing was begun
	Protected                   // of a file system that is read-only; nothing was begun
	Refused                     // of rights: the file's, or those of the process; nothing was begun
	Device                      // of what is under the file system, or of the way to it
	Unanswered                  // there was no answer, or the root is out
)

// errnos are those of each condition.
var errnos = map[Condition][]unix.Errno{
	Gone:      {unix.ENOENT, unix.ENOTDIR, unix.EISDIR, unix.ESTALE},
	Shortage:  {unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.ENOBUFS, unix.EINTR, unix.EAGAIN},
	NoRoom:    {unix.ENOSPC, unix.EDQUOT},
	Protected: {unix.EROFS},
	Refused:   {unix.EACCES, unix.EPERM},
	Device: {
		unix.EIO, unix.ENXIO, unix.ENODEV, unix.ENOTCONN, unix.ESHUTDOWN, unix.EHOSTDOWN, unix.EREMOTEIO, unix.ETIMEDOUT,
		unix.EUCLEAN, unix.EBUSY, unix.ECONNABORTED, unix.ECONNRESET, unix.ECONNREFUSED, unix.EHOSTUNREACH, unix.ENETDOWN,
		unix.ENETUNREACH, unix.ENOLINK, // file systems of a network, and those whose process has ended
	},
}

// Judge says what an error speaks of.
func Judge(err error) Condition {
	if errors.Is(err, staging.ErrHung) || errors.Is(err, ErrOut) {
		return Unanswered
	}
	if errors.Is(err, fs.ErrNotExist) {
		return Gone
	}
	var errno unix.Errno
	if errors.As(err, &errno) {
		for c, list := range errnos {
			if slices.Contains(list, errno) {
				return c
			}
		}
	}
	return Other
}

// MayBeOneFile says that the error may be of one file alone, or of all of its root.
func (c Condition) MayBeOneFile() bool { return c == Gone || c == Refused || c == Device }

// Untouched says that an operation that failed so has changed nothing.
func (c Condition) Untouched() bool { return c >= Shortage && c <= Refused }
