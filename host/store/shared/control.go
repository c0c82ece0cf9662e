package shared

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"
)

// Control files are JSON behind a checksum, replaced by a rename within their directory. Each has one writer.

const (
	controlMagic = "kvshare1 "
	controlHead  = len(controlMagic) + 16 + 1
	maxControl   = 64 << 20
)

func encodeControl(v any) ([]byte, error) {
	text, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	return append(fmt.Appendf(nil, "%s%016x\n", controlMagic, xxh3.Hash(text)), text...), nil
}

func decodeControl(b []byte, v any) error {
	if len(b) < controlHead || string(b[:len(controlMagic)]) != controlMagic {
		return fmt.Errorf("%w: no heading", ErrDamaged)
	}
	head, text := b[:controlHead], b[controlHead:]
	if want := fmt.Appendf(nil, "%s%016x\n", controlMagic, xxh3.Hash(text)); !bytes.Equal(head, want) {
		return fmt.Errorf("%w: its checksum", ErrDamaged)
	}
	if err := json.Unmarshal(text, v); err != nil {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return nil
}

// JudgeControl compares a control file with its checksum: a member's status, an evictor's beat, grants and journal.
func JudgeControl(b []byte) error {
	var any json.RawMessage
	return decodeControl(b, &any)
}

// put replaces a control file.
func (m *Member) put(name string, v any) error { return m.replace(name, v, false) }

// keep replaces one that others go by after a loss of power: it is durable, and so is its name.
func (m *Member) keep(name string, v any) error {
	if err := m.replace(name, v, true); err != nil {
		return err
	}
	return m.fs.SyncDir(name[:strings.LastIndexByte(name, '/')])
}

func (m *Member) replace(name string, v any, sync bool) error {
	b, err := encodeControl(v)
	if err != nil {
		return err
	}
	f, err := m.fs.OpenFile(name+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(b, 0)
	if err == nil && sync {
		err = f.Datasync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return m.fs.Rename(name+".new", name)
}

func (m *Member) get(name string, v any) error {
	f, err := m.fs.OpenFile(name, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if info.Size > maxControl {
		return fmt.Errorf("%w: %s has %d bytes", ErrDamaged, name, info.Size)
	}
	b := make([]byte, info.Size)
	n, err := f.ReadAt(b, 0)
	if err != nil && err != io.EOF {
		return err
	}
	if err := decodeControl(b[:n], v); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// list gives the names in a directory; none when it is not there.
func (m *Member) list(dir string) ([]string, error) {
	entries, err := m.fs.ReadDir(dir)
	if missing(err) {
		return nil, nil
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names, err
}

// removeAll removes a directory of ours and what is in it. What is gone already is no error.
func (m *Member) removeAll(dir string) error {
	entries, err := m.fs.ReadDir(dir)
	if missing(err) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		name := dir + "/" + e.Name()
		if e.IsDir() {
			err = m.removeAll(name)
		} else {
			err = m.remove(name)
		}
		if err != nil {
			return err
		}
	}
	return m.remove(dir)
}

func (m *Member) remove(name string) error {
	if err := m.fs.Remove(name); err != nil && !missing(err) {
		return err
	}
	return nil
}

func (m *Member) exists(name string) bool {
	_, err := m.fs.Stat(name)
	return err == nil
}

// missing says that a name is not there: never was, or not any more.
func missing(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESTALE) }
