// Package regular reads small files that an operator names: configurations, policy modules, signatures and keys. Such a name
// may belong to anything: a FIFO without a writer, a device, a file of a terabyte, or a file on a mount that hangs. None of
// these may stop the program. [Renewed] follows files that are renewed, and [Replace] writes a file.
package regular

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

var (
	// ErrNotRegular means that a path names something other than a regular file.
	ErrNotRegular = errors.New("not a regular file")
	// ErrTooLarge means that a file is larger than the limit.
	ErrTooLarge = errors.New("file too large")
)

// ReadFile reads a regular file of at most limit bytes. It follows symbolic links. If ctx ends first, ReadFile returns the
// context's error, and the read ends later by itself.
func ReadFile(ctx context.Context, path string, limit int64) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	type result struct {
		b   []byte
		err error
	}
	done := make(chan result, 1)
	go func() {
		b, err := readFile(path, limit)
		done <- result{b, err}
	}()
	select {
	case r := <-done:
		return r.b, r.err
	case <-ctx.Done():
		return nil, fmt.Errorf("read %s: %w", path, context.Cause(ctx))
	}
}

func readFile(path string, limit int64) ([]byte, error) {
	info, err := os.Stat(path) // some devices act on being opened
	if err == nil && !info.Mode().IsRegular() {
		err = notRegular(path, info)
	}
	if err != nil {
		return nil, err
	}
	// The path may have become a FIFO since. Without O_NONBLOCK, the open would wait for a writer.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err = f.Stat(); err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, notRegular(path, info)
	}
	if info.Size() > limit {
		return nil, tooLarge(path, limit)
	}
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(b)) > limit { // the file has grown, or its file system reports no sizes
		return nil, tooLarge(path, limit)
	}
	return b, nil
}

func notRegular(path string, info fs.FileInfo) error {
	kind := "device"
	switch mode := info.Mode(); {
	case mode.IsDir():
		kind = "directory"
	case mode&fs.ModeNamedPipe != 0:
		kind = "FIFO"
	case mode&fs.ModeSocket != 0:
		kind = "socket"
	}
	return fmt.Errorf("%s is a %s: %w", path, kind, ErrNotRegular)
}

func tooLarge(path string, limit int64) error {
	return fmt.Errorf("%s has more than %d bytes: %w", path, limit, ErrTooLarge)
}

// Replace writes a temporary next to a file and renames it, so that a reader never gets a part of it.
func Replace(path string, data []byte, mode fs.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".kvhost-")
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Chmod(mode), f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		err = errors.Join(err, os.Remove(f.Name()))
	}
	return err
}
