package plugintest

import (
	"encoding/binary"
	"fmt"
	"slices"
	"unsafe"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
)

// evictor passes events and asks to one instance.
type evictor struct {
	c      *checker
	p      *policy.Probe
	slots  uint32
	stride uint32
	batch  int
	wait   []abi.Event
}

func (c *checker) evictor(slots, longer uint32) (*evictor, error) {
	p, err := c.probe(slots, longer)
	if err != nil {
		return nil, err
	}
	e := &evictor{c: c, p: p, slots: slots, stride: abi.EventSize + longer}
	batch, victims, _, _ := p.Limits()
	e.batch = batch
	err = c.room(p, map[int]uint32{abi.BufferEvents: fullBatch * e.stride, abi.BufferArgs: abi.AskSize + longer,
		abi.BufferResult: uint32(victims) * 4})
	if err != nil {
		p.Close()
		return nil, err
	}
	return e, nil
}

// fullBatch is the number of records that a host passes in one call.
const fullBatch = 256

// event queues an event. flushed reports whether it completed a batch, which was then delivered.
func (e *evictor) event(ev abi.Event) (flushed bool, err error) {
	if e.wait = append(e.wait, ev); len(e.wait) == e.batch {
		return true, e.flush()
	}
	return false, nil
}

// write copies the queued events into the guest's buffer.
func (e *evictor) write() error {
	b, err := e.p.Bytes(abi.BufferEvents, uint32(len(e.wait))*e.stride)
	if err != nil {
		return e.c.fault(abi.ExportBuffer, "EVENTS", err)
	}
	for i := range e.wait {
		record := b[i*int(e.stride):][:e.stride]
		*(*abi.Event)(unsafe.Pointer(&record[0])) = e.wait[i]
		for j := range record[abi.EventSize:] {
			record[abi.EventSize+j] = 0xab // fields of a later version
		}
	}
	if len(e.wait) > 0 {
		e.p.SetNow(e.wait[len(e.wait)-1].Time)
	}
	return nil
}

func (e *evictor) flush() error {
	if len(e.wait) == 0 {
		return nil
	}
	if err := e.write(); err != nil {
		return err
	}
	_, _, err := e.c.good(e.p, abi.ExportEvents, uint64(len(e.wait)), uint64(e.stride), len(e.wait))
	e.wait = e.wait[:0]
	return err
}

// step delivers the queued events and asks for victims, which are in range and distinct.
func (e *evictor) step(ask abi.Ask) ([]uint32, error) {
	if err := e.write(); err != nil {
		return nil, err
	}
	args, err := e.p.Bytes(abi.BufferArgs, abi.AskSize)
	if err != nil {
		return nil, e.c.fault(abi.ExportBuffer, "ARGS", err)
	}
	*(*abi.Ask)(unsafe.Pointer(&args[0])) = ask
	waited := len(e.wait)
	e.wait = e.wait[:0]
	n, ok, err := e.c.good(e.p, abi.ExportStep, uint64(waited), uint64(e.stride), waited)
	if err != nil || !ok {
		return nil, err
	}
	if n > ask.MaxVictims {
		return nil, e.c.finding(abi.ExportStep, fmt.Sprintf("it names %d victims when asked for at most %d", n,
			ask.MaxVictims), "stop at ask.max_victims")
	}
	b, err := e.p.Bytes(abi.BufferResult, n*4)
	if err != nil {
		return nil, e.c.fault(abi.ExportStep, "RESULT", err)
	}
	out := make([]uint32, n)
	for i := range out {
		out[i] = binary.LittleEndian.Uint32(b[4*i:])
		if out[i] >= e.slots {
			return nil, e.c.finding(abi.ExportStep, fmt.Sprintf("it names slot %d, slots are below %d", out[i], e.slots),
				"name only slots that INSERT or RESIDENT brought")
		}
		if slices.Contains(out[:i], out[i]) {
			return nil, e.c.finding(abi.ExportStep, fmt.Sprintf("it names slot %d twice in one answer", out[i]),
				"name each victim once")
		}
	}
	return out, nil
}
