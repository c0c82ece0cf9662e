package policy

import (
	"errors"
	"testing"

	"github.com/kvhost/kvhost/abi"
)

func TestProbe(t *testing.T) {
	m := modules["lru"]
	p, err := m.Probe(t.Context(), ProbeOptions{Role: abi.RoleEvict, MaxSlots: 100, ExtraStride: 8})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if p.Used == 0 || p.Used > p.Allowed {
		t.Errorf("the start used %d of %d", p.Used, p.Allowed)
	}
	const stride = abi.EventSize + 8
	for kind, size := range map[int]uint32{abi.BufferEvents: 4 * stride, abi.BufferArgs: abi.AskSize + 8, abi.BufferResult: 64} {
		if ok, err := p.Buffer(kind, size); !ok || err != nil {
			t.Fatalf("kind %d: %v, %v", kind, ok, err)
		}
	}
	b, err := p.Bytes(abi.BufferEvents, 2*stride)
	if err != nil {
		t.Fatal(err)
	}
	for i, slot := range []byte{7, 9} {
		ev := b[i*stride:]
		clear(ev[:stride])
		ev[0], ev[4], ev[5], ev[6], ev[7], ev[24], ev[40] = slot, 0xff, 0xff, 0xff, 0xff, 1, byte(abi.OpInsert)
	}
	args, _ := p.Bytes(abi.BufferArgs, abi.AskSize)
	copy(args, []byte{1, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0xff, 0xff, 0xff, 0xff})
	r, err := p.Call(abi.ExportStep, 2, stride, 2)
	if status, n := abi.Unpack(r); err != nil || status != 0 || n != 1 {
		t.Fatalf("status %d, %d victims, %v", status, n, err)
	}
	if out, _ := p.Bytes(abi.BufferResult, 4); out[0] != 7 {
		t.Errorf("slot %d, want 7", out[0])
	}
	if p.Used == 0 || p.MemoryBytes() == 0 {
		t.Errorf("used %d, memory %d", p.Used, p.MemoryBytes())
	}
	if r, err := p.Call(abi.ExportEvents, 1, 8, 1); abi.Status(int32(uint32(r))) != abi.StatusBadInput || err != nil {
		t.Errorf("a stride of 8: status %d, %v", int32(uint32(r)), err)
	}
	if _, err := p.Call(abi.ExportAdmit, 0, 0, 0); !errors.Is(err, ErrBadModule) {
		t.Errorf("an export it does not have: %v", err)
	}
	if _, err := natives["lru"].Probe(t.Context(), ProbeOptions{Role: abi.RoleEvict}); !errors.Is(err, ErrBadModule) {
		t.Errorf("a native module: %v", err)
	}
}
