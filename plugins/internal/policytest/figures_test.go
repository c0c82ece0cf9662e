package policytest_test

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/plugins/arc"
	"github.com/kvhost/kvhost/plugins/clock"
	"github.com/kvhost/kvhost/plugins/fifo"
	"github.com/kvhost/kvhost/plugins/gdsf"
	"github.com/kvhost/kvhost/plugins/internal/policytest"
	"github.com/kvhost/kvhost/plugins/lfu"
	"github.com/kvhost/kvhost/plugins/lirs"
	"github.com/kvhost/kvhost/plugins/lru"
	"github.com/kvhost/kvhost/plugins/s3fifo"
	"github.com/kvhost/kvhost/plugins/sieve"
	"github.com/kvhost/kvhost/plugins/twoq"
	"github.com/kvhost/kvhost/plugins/wtinylfu"
)

var update = flag.Bool("update", false, "write testdata/figures.txt anew")

// policies are the textbook ones, with the settings under which their figures are kept.
var policies = []struct {
	name   string
	make   policytest.Make
	config guest.Config
}{
	{"lru", policytest.Of(lru.New), nil},
	{"fifo", policytest.Of(fifo.New), nil},
	{"clock", policytest.Of(clock.New), nil},
	{"sieve", policytest.Of(sieve.New), nil},
	{"lfu", policytest.Of(lfu.New), nil},
	{"lfu aging=false", policytest.Of(lfu.New), guest.Config{lfu.ConfigAging: "false"}},
	{"gdsf", policytest.Of(gdsf.New), nil},
	{"twoq", policytest.Of(twoq.New), nil},
	{"arc", policytest.Of(arc.New), nil},
	{"s3fifo", policytest.Of(s3fifo.New), nil},
	{"wtinylfu", policytest.Of(wtinylfu.New), nil},
	{"wtinylfu adapt=false", policytest.Of(wtinylfu.New), guest.Config{wtinylfu.ConfigAdapt: "false", wtinylfu.ConfigWindow: "1", wtinylfu.ConfigSample: "10"}},
	{"lirs", policytest.Of(lirs.New), nil},
}

// TestFigures pins every policy's misses on generated streams: a change that moves one is a change of policy.
func TestFigures(t *testing.T) {
	const file = "testdata/figures.txt"
	var got strings.Builder
	streams := policytest.Streams(50000)
	for _, stream := range []string{"skewed", "loop", "phases", "conversations"} {
		for _, p := range policies {
			fmt.Fprintf(&got, "%-14s %-21s", stream, p.name)
			for _, capacity := range []int{30, 100, 300} {
				c := policytest.NewCache(t, p.make, capacity, p.config)
				fmt.Fprintf(&got, " %6d", policytest.Misses(c, streams[stream]))
			}
			got.WriteByte('\n')
		}
	}
	if *update {
		if err := os.WriteFile(file, []byte(got.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	wants := strings.Split(string(want), "\n")
	for i, line := range strings.Split(got.String(), "\n") {
		if i >= len(wants) || line != wants[i] {
			t.Errorf("line %d is %q in place of %q", i+1, line, wants[min(i, len(wants)-1)])
		}
	}
}
