package plugintest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
)

// compile builds a C source from testdata with macros, for the table below.
func compile(t *testing.T, source, manifest string, macros ...string) string {
	t.Helper()
	testenv.Need(t, testenv.Clang)
	dir := t.TempDir()
	text := filepath.Join(dir, "manifest.json")
	testenv.OK(t, os.WriteFile(text, []byte(manifest), 0o644))
	out := filepath.Join(dir, "module.wasm")
	args := []string{
		"--target=wasm32", "-O1", "-mbulk-memory", "-nostdlib", "-ffreestanding", "-fno-builtin", "-I../../../../abi/c", "-Wl,--no-entry",
		"-DMANIFEST=\"" + text + "\"", "-o", out, filepath.Join("testdata", source),
	}
	for _, m := range macros {
		args = append(args, "-D"+m)
	}
	if msg, err := exec.Command("clang", args...).CombinedOutput(); err != nil {
		t.Fatalf("clang: %v\n%s", err, msg)
	}
	return out
}

const (
	evictManifest   = `{"name":"broken","abi":1,"roles":["evict"],"memory_pages":2048}`
	randomManifest  = `{"name":"broken","abi":1,"roles":["evict"],"memory_pages":2048,"grants":["random"]}`
	aheadManifest   = `{"name":"broken","abi":1,"roles":["evict"],"memory_pages":2048,"victims_ahead":64}`
	statedManifest  = `{"name":"broken","abi":1,"roles":["evict"],"memory_pages":2048,"state_format":"broken/1"}`
	answersManifest = `{"name":"broken","abi":1,"roles":["admit","place","layout"]}`
)

// patient leaves it to fuel alone to end a call: the time of its processor depends on the machine.
var patient = sandbox.Fuel{Time: time.Hour}

// Each way to break a policy has its finding, and what is not broken has none.
func TestBroken(t *testing.T) {
	for _, c := range []struct {
		source, manifest, macro string
		want                    string // in a finding; empty for none
	}{
		{"evict.c", evictManifest, "NOTHING", ""},
		{"evict.c", statedManifest, "SAVES", ""},
		{"answers.c", answersManifest, "NOTHING", ""},

		{"evict.c", evictManifest, "NO_MANIFEST", "section kvhost.manifest: there is none"},
		{"evict.c", randomManifest, "NOTHING", `asks for the grant "random", which no import needs`},
		{"evict.c", `{"name":"broken","abi":1,"roles":["admit"]}`, "NOTHING", "a host refuses it"},
		{"evict.c", `{"name":"broken","abi":2,"roles":["evict"]}`, "NOTHING", "a host refuses it"},
		{"evict.c", strings.Replace(evictManifest, "2048", "3", 1), "NOTHING", "kv_init: refused its settings with status -2 (with max_slots"},
		{"evict.c", evictManifest, "FEW_SLOTS", `"too many slots"`},
		{"evict.c", evictManifest, "TRAPS", "unreachable"},
		{"evict.c", evictManifest, "ENDLESS", "used up its fuel"},
		{"evict.c", evictManifest, "NAMES_PINNED", "which is pinned"},
		{"evict.c", evictManifest, "KEEPS_REMOVED", "in which nothing is"},
		{"evict.c", evictManifest, "ANY_TENANT", "when tenant"},
		{"evict.c", evictManifest, "TOO_MUCH", "free the"},
		{"evict.c", aheadManifest, "NOTHING", "with victims_ahead it named"},
		{"evict.c", evictManifest, "TOO_MANY", "when asked for at most"},
		{"evict.c", evictManifest, "TWICE", "twice in one answer"},
		{"evict.c", evictManifest, "OUT_OF_RANGE", "slots are below"},
		{"evict.c", evictManifest, "NAMES_NOBODY", "it named no victim"},
		{"evict.c", evictManifest, "FALLS_SILENT", "questions in a row, with entries that could go"},
		{"evict.c", evictManifest, "HEEDS_UNKNOWN", "with events it must ignore"},
		{"evict.c", evictManifest, "READS_BEYOND", "with records 8 bytes longer"},
		{"evict.c", evictManifest, "READS_BEYOND", "it takes records of 4 bytes"},
		{"evict.c", evictManifest, "ANY_BUFFER", "which does not exist"},
		{"evict.c", evictManifest, "ANY_INFO", "it takes an Info of 16 bytes"},
		{"evict.c", evictManifest, "SAVES", "names no state_format"},
		{"evict.c", statedManifest, "FORGETS", "after kv_save and kv_load"},
		{"evict.c", statedManifest, "TRUSTS_STATE", "given a state that is damaged"},

		{"answers.c", answersManifest, "WANTS_SLOTS", `"no slots"`},
		{"answers.c", answersManifest, "ADMIT_TWO", "answers 2 for candidate"},
		{"answers.c", answersManifest, "ADMIT_SHORT", "answers to"},
		{"answers.c", answersManifest, "ADMIT_DRIFTS", "with records 16 bytes longer"},
		{"answers.c", answersManifest, "NAMESPACE_TRAPS", "given id 0xfffffffe it faults"},
		{"answers.c", answersManifest, "NAMESPACE_SHORT", "to a text of 20010 bytes"},
		{"answers.c", answersManifest, "PATH_UP", "starts with a dot"},
		{"answers.c", answersManifest, "COLLIDES", "to two"},
		{"answers.c", answersManifest, "ROOT_FAR", "chooses root 7 of 0"},
		{"answers.c", answersManifest, "ROOT_CLOSED", "which takes no stores"},
		{"answers.c", answersManifest, "PLACE_TRAPS", "which was not announced"},
		{"answers.c", answersManifest, "LAYOUT_MISSES", "each byte of each page exactly once"},
		{"answers.c", answersManifest, "LAYOUT_OVER", "status -2"},
		{"answers.c", answersManifest, "LAYOUT_DRIFTS", "asked twice"},
	} {
		t.Run(strings.TrimSuffix(c.source, ".c")+"/"+c.macro, func(t *testing.T) {
			t.Parallel()
			r, err := Check(t.Context(), compile(t, c.source, c.manifest, c.macro), Options{
				Cache: policytest.Cache(t), Slots: 1 << 14, Fuel: patient, rounds: 300,
			})
			testenv.OK(t, err)
			var said []string
			for i := range r.Findings {
				said = append(said, r.Findings[i].Error())
			}
			all := strings.Join(said, "\n")
			if strings.Count(all, "\n") != max(0, len(said)-1) {
				t.Errorf("a finding is one line:\n%s", all)
			}
			if (c.want == "") != (all == "") || !strings.Contains(all, c.want) {
				t.Errorf("want the finding %q, got:\n%s", c.want, all)
			}
		})
	}
}

// Every first-party policy conforms.
func TestFirstParty(t *testing.T) {
	dir := policytest.Dir(t)
	files, err := filepath.Glob(filepath.Join(dir, "*.wasm"))
	if err != nil || len(files) < 5 {
		t.Fatalf("%d policies in %s, %v", len(files), dir, err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".wasm"), func(t *testing.T) {
			t.Parallel()
			r, err := Check(t.Context(), file, Options{Cache: policytest.Cache(t), Slots: 1 << 17, Fuel: patient})
			testenv.OK(t, err)
			for i := range r.Findings {
				t.Error(&r.Findings[i])
			}
			if len(r.Roles) == 0 || r.Memory == 0 || len(r.Calls) < 2 {
				t.Errorf("the report lacks roles, memory or calls: %+v", r)
			}
			for _, u := range r.Calls {
				t.Logf("%-12s %5.1f %% of its fuel in the dearest call: %d of %d, %d records", u.Export, 100*u.Share(), u.Used, u.Allowed, u.Records)
			}
		})
	}
}

// The world has its own tables, because it does more than hosts do. Its events keep the contract all the same.
func TestWorldKeepsTheContract(t *testing.T) {
	for seed := range uint64(20) {
		var events []abi.Event
		w := newWorld(seed, 40)
		w.emit = func(ev abi.Event) { events = append(events, ev) }
		w.ask = func(ask abi.Ask) (victims []uint32) {
			for slot, n := range w.slots {
				if n >= 0 && w.nodes[n].pins == 0 && len(victims) < int(ask.MaxVictims) {
					victims = append(victims, uint32(slot))
				}
			}
			return victims
		}
		w.fill(10)
		for range 200 {
			w.round()
		}
		if len(events) < 1000 || w.named == 0 {
			t.Fatalf("seed %d: %d events, %d victims: nothing to check", seed, len(events), w.named)
		}
		if err := policytest.CheckEvents(events); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
}
