package s3fs

import (
	"bytes"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/kvhost/kvhost/host/internal/testkit/s3double"
)

// TestLateAnswer: a read that gets no answer is asked for again once that is late, and the second answer is the object. Without a
// budget it waits for the first.
func TestLateAnswer(t *testing.T) {
	s := s3double.Start(t)
	p := s3double.StartProxy(t, s.URL)
	f := open(t, p.URL)
	data := bytes.Repeat([]byte("late"), 10_000)
	s.Set("some/prefix/object", data)
	load := func() {
		t.Helper()
		r, err := f.OpenFile(top+"/object", os.O_RDONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		got := make([]byte, len(data))
		if _, err := r.ReadAt(got, 0); err != nil || !bytes.Equal(got, data) {
			t.Errorf("error %v, the right bytes: %t", err, bytes.Equal(got, data))
		}
	}
	load()
	for _, c := range []struct {
		left   float64
		fault  s3double.Fault
		failed uint64
	}{{1, s3double.Stall, 0}, {1, s3double.Late, 0}, {0, s3double.Late, 0}} {
		f.hedge.late, f.hedge.left = 20*time.Millisecond, c.left
		before, asked := f.Stats(), s.Count("GET")
		p.Set(s3double.Rule{Fault: c.fault, Method: "GET", Times: 1})
		load()
		now := f.Stats()
		if failed := now.Failed[Get] - before.Failed[Get]; failed != c.failed {
			t.Errorf("%s, %g to ask again: %d reads failed, want %d", c.fault, c.left, failed, c.failed)
		}
		if extra := now.Requests[Get] - before.Requests[Get] - 1; c.left == 0 && extra != 0 || c.left > 0 && extra < 1 {
			t.Errorf("%s, %g to ask again: %d reads more than without a fault", c.fault, c.left, extra)
		}
		if s.Count("GET") == asked {
			t.Error("the server was not asked")
		}
	}
}

// TestWhenAnAnswerIsLate: about one in twenty is, and no more are asked for again.
func TestWhenAnAnswerIsLate(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	var h hedge
	var all []time.Duration
	again := 0
	for range 20_000 {
		d := time.Duration(random.ExpFloat64() * float64(10*time.Millisecond))
		if late := h.after(); late > 0 && d > late && h.spend() {
			again++
		}
		h.took(d)
		all = append(all, d)
	}
	slices.Sort(all)
	if late := h.after(); late < all[len(all)*85/100] || late > all[len(all)*99/100] {
		t.Errorf("late is %s, of answers that take %s at the 85th and %s at the 99th percentile", late, all[len(all)*85/100], all[len(all)*99/100])
	}
	if again < len(all)/40 || again > len(all)/20 {
		t.Errorf("%d of %d are asked for again, want 2.5 to 5 %%", again, len(all))
	}
}
