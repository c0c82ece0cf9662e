package gds

import (
	"fmt"
	"syscall"
	"unsafe"
)

// asyncCall holds the arguments that an asynchronous call reads by address. It must not change until the call is
// done.
type asyncCall struct {
	size      uint64
	fileOff   int64
	bufferOff int64
	done      int64 // bytes, or a negative code
}

// ReadAsync is Read with a call that is queued on the thread's stream. It waits for the result.
func (c *CuFile) ReadAsync(t *Thread, handle uintptr, base uint64, size, off, at int64) (int64, error) {
	return c.queue(t, &c.fn.readAsync, handle, base, size, off, at)
}

// WriteAsync is the inverse of ReadAsync.
func (c *CuFile) WriteAsync(t *Thread, handle uintptr, base uint64, size, off, at int64) (int64, error) {
	return c.queue(t, &c.fn.writeAsync, handle, base, size, off, at)
}

func (c *CuFile) queue(t *Thread, f *function, handle uintptr, base uint64, size, off, at int64) (int64, error) {
	if f.addr == 0 {
		return 0, fmt.Errorf("%w: %s", ErrSymbol, f.name)
	}
	a := &t.async
	*a = asyncCall{size: uint64(size), fileOff: off, bufferOff: at, done: unanswered}
	err := c.callOn(t, f, handle, uintptr(base), uintptr(unsafe.Pointer(&a.size)), uintptr(unsafe.Pointer(&a.fileOff)),
		uintptr(unsafe.Pointer(&a.bufferOff)), uintptr(unsafe.Pointer(&a.done)), t.stream)
	// Wait even if the call was refused: nothing may write to the thread's fields, or to the memory, after the
	// return.
	if waited := t.wait(); err == nil {
		err = waited
	}
	switch done := *(*int64)(unsafe.Pointer(&a.done)); {
	case err != nil:
		return 0, err
	case done >= 0:
		return done, nil
	case done == unanswered:
		return 0, fmt.Errorf("%w: %s was queued and never done", ErrShort, f.name)
	case -done > firstFileCode:
		return 0, &FileError{Call: f.name, Code: int32(-done)}
	default:
		return 0, &FileError{Call: f.name, Errno: syscall.Errno(-done)}
	}
}

// unanswered is a count that cuFile never returns.
const unanswered = -1 << 62

// firstFileCode is below cuFile's own codes and above every errno.
const firstFileCode = 5000
