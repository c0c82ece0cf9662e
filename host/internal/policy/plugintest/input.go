package plugintest

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
)

// oddBuffers requests unusual buffers, among them those of newer hosts.
func (c *checker) oddBuffers(p *policy.Probe) error {
	for _, kind := range []uint64{99, 0x7fffffff, 0xffffffff} {
		r, err := p.Call(abi.ExportBuffer, kind, 64, 0)
		if err != nil {
			return c.fault(abi.ExportBuffer, fmt.Sprintf("kind %d", kind), err)
		}
		if uint32(r) != 0 {
			return c.finding(abi.ExportBuffer, fmt.Sprintf("it gives room for kind %d, which does not exist", kind),
				"answer 0 for kinds you do not know")
		}
	}
	r, err := p.Call(abi.ExportBuffer, abi.BufferInfo, 0xfffffff0, 0)
	if err != nil {
		return c.fault(abi.ExportBuffer, "4 GiB", err)
	}
	if uint32(r) != 0 {
		return c.finding(abi.ExportBuffer, "it gives room of 4 GiB, which it cannot have",
			"answer 0 when there is no such room; mind sums that wrap")
	}
	return c.room(p, map[int]uint32{abi.BufferInfo: 100_000}) // a long namespace's text
}

// shortInfo gives kv_init too few bytes.
func (c *checker) shortInfo() error {
	for _, info := range []struct {
		what      string
		size, len uint32 // the size field of Info, and the length argument of the call
	}{
		{"an Info of 16 bytes", 16, 16}, {"settings that end after the buffer", abi.InfoSize, abi.InfoSize},
	} {
		p, err := c.m.Probe(c.ctx, policy.ProbeOptions{Role: c.role, Bare: true, Config: c.o.Config})
		if err != nil {
			return c.fault(abi.ExportInitialize, "", err)
		}
		defer p.Close()
		if err := c.room(p, map[int]uint32{abi.BufferInfo: abi.InfoSize}); err != nil {
			return err
		}
		b, err := p.Bytes(abi.BufferInfo, abi.InfoSize)
		if err != nil {
			return c.fault(abi.ExportBuffer, "", err)
		}
		clear(b)
		binary.LittleEndian.PutUint32(b, info.size)
		binary.LittleEndian.PutUint32(b[4:], abi.Version)
		binary.LittleEndian.PutUint32(b[60:], 1<<20) // config_len
		status, _, err := c.call(p, abi.ExportInit, uint64(info.len), 0, 0)
		if err != nil {
			return c.tolerate(err, "given "+info.what)
		}
		if status == abi.StatusOK {
			return c.finding(abi.ExportInit, "it takes "+info.what, "compare len, size and config_len before you read, and "+
				"answer -1")
		}
	}
	return nil
}

// noExport reports that the module lacks an optional export.
func noExport(err error) bool { return errors.Is(err, policy.ErrBadModule) }

// shortRecords calls a role with records that are too short.
func (c *checker) shortRecords(p *policy.Probe, export string) error {
	status, _, err := c.call(p, export, 1, 4, 1)
	if err != nil {
		return c.tolerate(err, "given a stride of 4")
	}
	if status >= 0 {
		return c.finding(export, "it takes records of 4 bytes", "answer -1 (bad input) for a stride shorter than the "+
			"record you know")
	}
	return nil
}

// strangeNamespace announces a namespace with an id that is out of range.
func (c *checker) strangeNamespace(p *policy.Probe) error {
	if _, err := p.Call(abi.ExportNamespace, 0xfffffffe, 0, 0); err != nil && !noExport(err) {
		return c.tolerate(c.fault(abi.ExportNamespace, "", err), "given id 0xfffffffe")
	}
	return nil
}

// tolerate returns the finding for a trap at bad input.
func (c *checker) tolerate(err error, when string) error {
	if f, ok := errors.AsType[*Finding](err); ok {
		return c.finding(f.Where, when+" it faults: "+f.What, "check arguments first, and answer -1 (bad input)")
	}
	return err
}
