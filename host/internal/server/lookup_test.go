package server

import (
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/kv"
)

// A LOOKUP says how many bytes its hits are, and once something was loaded how long that takes.
func TestLookupSaysWhatALoadCosts(t *testing.T) {
	r := newRig(t, nil)
	p := r.dial(nil)
	p.save(0, 4)
	first := p.look(4)
	if first.Bytes != 4*chunkBytes || first.LoadTime != 0 {
		t.Errorf("%d bytes, %v before anything was loaded", first.Bytes, first.LoadTime)
	}
	if res := p.loaded(p.loads(first, 4)); len(res.Failed) > 0 {
		t.Fatal(res.Failed)
	}
	again := p.look(4)
	if again.Bytes != 4*chunkBytes || again.LoadTime <= 0 || again.LoadTime > time.Minute {
		t.Errorf("%d bytes, %v", again.Bytes, again.LoadTime)
	}
	miss, err := p.Lookup(t.Context(), client.LookupRequest{Keys: []kv.Key{key(99)}})
	if err != nil || miss.Bytes != 0 || miss.LoadTime != 0 {
		t.Errorf("lookup that misses: got %+v, %v", miss, err)
	}
}
