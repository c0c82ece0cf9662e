package command

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/bench"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/sim"
)

// errStepped ends a simulation after enough calls were shown.
var errStepped = errors.New("command: shown as far as wanted")

func newPolicyStep() *cobra.Command {
	f := simFlags{quiet: true, ratio: 1, levels: levelFlags{writes: []string{"back"}}}
	s := &stepper{slots: map[uint32]stepRow{}}
	var trace, capacity string
	var profile bool
	cmd := &cobra.Command{
		Use:   "step MODULE",
		Short: "Play a trace through a policy decision by decision",
		Long: `Runs kvhost sim and shows the calls of the module: each event, each question and its answer, the fuel of the call, and
the lines that the module logged. MODULE may have settings, as in --policy of kvhost sim.

An evict policy evicts from one root. A layout policy lays out the pages of models, and needs no trace. An admit or place policy needs
--level: each level is one root, in which lru evicts.

On a terminal each decision waits for Enter. A number plays that many decisions, and q ends.`,
		Example: `  kvhost policy step --trace examples/traces/mixed.jsonl.zst --until 20 mine.wasm
  kvhost policy step --trace a.jsonl.gz --only evict --json mine.wasm:chances=2 | jq .victims
  kvhost policy step --trace a.jsonl.gz --level 0=1%,1=10% --cost 0=50,1=5 --from 100 reuse.wasm
  kvhost policy step --trace a.jsonl.gz --only log --profile mine.wasm`,
		Args: wantArgs(1, 1, "one .wasm file"),
		RunE: func(cmd *cobra.Command, args []string) error {
			for _, what := range s.only {
				if !slices.Contains([]string{"events", "evict", "admit", "place", "layout", "log"}, what) {
					return usageError{fmt.Errorf("--only %s: want events, evict, admit, place, layout or log", what)}
				}
			}
			if trace != "" {
				f.traces = []string{trace}
			}
			f.policies, f.capacities, f.roles = args, []string{capacity}, s.plays(abi.RoleEvict, abi.RoleLayout)
			if f.levels.on() {
				f.policies, f.roles = []string{"lru.wasm"}, []abi.Role{abi.RoleEvict}
				f.levels.admissions, f.levels.roles = args, s.plays(abi.RoleAdmit, abi.RolePlace)
			}
			f.step, s.json, s.out = s, f.asJSON, bufio.NewWriter(cmd.OutOrStdout())
			if term.IsTerminal(int(os.Stdin.Fd())) && term.IsTerminal(int(os.Stdout.Fd())) && !s.json {
				s.keys = bufio.NewScanner(os.Stdin)
			}
			if profile {
				s.profile = &sandbox.Profile{}
			}
			err := f.run(cmd.Context())
			if errors.Is(err, errStepped) {
				err = nil
			} else if errors.Is(err, policy.ErrRole) && !f.levels.on() {
				err = fmt.Errorf("%w; with --level it admits or places", err)
			}
			if err == nil && profile {
				writeProfile(s.out, s.profile.Functions())
			}
			return errors.Join(err, s.out.Flush())
		},
	}
	fl := cmd.Flags()
	fl.SortFlags = false
	fl.StringVar(&trace, "trace", "", "trace file, as of kvhost sim")
	fl.StringVar(&capacity, "capacity", "1%", "capacity of the root: a share of the trace's chunks, or a number of chunks")
	fl.StringSliceVar(&f.levels.capacities, "level", nil, "capacities of the levels, as 0=1%,1=10%")
	fl.StringSliceVar(&f.levels.costs, "cost", nil, "speed of loads from each level in GB/s, as 0=50,1=5")
	fl.Uint64Var(&s.from, "from", 1, "first decision to show")
	fl.Uint64Var(&s.until, "until", 0, "last decision to show; 0 for the last one of the trace")
	fl.StringSliceVar(&s.only, "only", nil, "kinds to show, separated by commas: events, evict, admit, place, layout, log (default: all; failures are always shown)")
	fl.BoolVar(&f.asJSON, "json", false, "print one JSON object per call")
	fl.BoolVar(&profile, "profile", false, "then print the fuel of the module's functions; calls take longer")
	fl.Uint64Var(&f.seed, "seed", 1, "seed of the policy")
	return cmd
}

// stepRow is an event, a victim or a candidate.
type stepRow struct {
	What    string  `json:"what"`
	Slot    *uint32 `json:"slot,omitempty"`
	Chunk   *uint64 `json:"chunk,omitempty"` // hash id in the trace
	Depth   uint32  `json:"depth,omitempty"`
	Parent  *uint32 `json:"parent_slot,omitempty"`
	From    *uint8  `json:"from_level,omitempty"`
	To      uint8   `json:"to_level,omitempty"`
	Uses    uint32  `json:"uses,omitempty"`    // since the entry was inserted
	Request uint32  `json:"request,omitempty"` // request of an event; for a victim, the last request that used it

	Continued bool `json:"continued,omitempty"`
}

// stepCall is a call in the form that is shown. Counts are those after the call's events.
type stepCall struct {
	role     abi.Role
	Decision uint64        `json:"decision,omitempty"`
	Request  uint32        `json:"request"`
	Time     time.Duration `json:"time_ns"` // time in the trace
	Events   []stepRow     `json:"events,omitempty"`
	Victims  []stepRow     `json:"victims,omitempty"`
	Asked    *stepRow      `json:"candidate,omitempty"`
	Admitted *bool         `json:"admitted,omitempty"`
	Roots    [][2]uint64   `json:"roots,omitempty"` // capacity and free bytes of each root, as the place policy was told
	Root     *uint32       `json:"root,omitempty"`  // root chosen by the policy, if it chose one
	Path     string        `json:"path,omitempty"`  // empty means the host's own name
	Pages    string        `json:"pages,omitempty"`
	Segments [][6]uint32   `json:"segments,omitempty"` // plane, first block, blocks, first byte of a page, bytes, gap
	Resident int           `json:"resident"`
	Hits     int           `json:"hits"`
	Misses   int           `json:"misses"`
	Evicted  int           `json:"evicted"`
	Fuel     uint64        `json:"fuel"`
	Allowed  uint64        `json:"fuel_allowed"`
	Took     time.Duration `json:"took_ns"`
	Log      []string      `json:"log,omitempty"`
	Error    string        `json:"error,omitempty"`
}

// stepper shows calls. It knows only as much of the root as the policy was told. It is also the handler of the module's log.
type stepper struct {
	slog.Handler
	from, until uint64
	only        []string
	json        bool
	profile     *sandbox.Profile
	out         *bufio.Writer
	keys        *bufio.Scanner // nil if no key is awaited
	ahead       uint64         // decisions to show before the next key is awaited
	slots       map[uint32]stepRow
	call        stepCall
}

// plays returns those of the given roles that are to be shown. If none is to be shown, it returns all of them.
func (s *stepper) plays(roles ...abi.Role) []abi.Role {
	shown := slices.DeleteFunc(slices.Clone(roles), func(r abi.Role) bool { return !slices.Contains(s.only, r.String()) })
	if len(shown) > 0 {
		return shown
	}
	return roles
}

func (s *stepper) Enabled(context.Context, slog.Level) bool { return true }
func (s *stepper) WithAttrs([]slog.Attr) slog.Handler       { return s }
func (s *stepper) Handle(_ context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		if r.Message == sandbox.LogMessage {
			s.call.Log = append(s.call.Log, r.Level.String()+": "+a.Value.String())
		}
		return true
	})
	return nil
}

func (s *stepper) observe(c *policy.Call) error {
	now := &s.call
	now.Fuel, now.Allowed, now.Took = c.Fuel, c.Allowed, c.Time
	for i := range c.Events {
		s.learn(&c.Events[i])
	}
	now.Resident = len(s.slots)
	decides := c.Ask != nil || len(c.Candidates) > 0 || c.Geometry != nil
	if decides {
		now.Decision++
	}
	for _, slot := range c.Victims {
		row := s.slots[slot]
		row.What, row.Slot = "victim", &slot
		now.Victims = append(now.Victims, row)
	}
	for i, x := range c.Candidates { // the simulator asks about one candidate at a time
		kind := []string{"new", "demotion", "promotion"}[x.Kind]
		now.Asked = &stepRow{What: kind, Chunk: new(sim.HashID(x.Key)), Depth: x.Depth, To: x.To, Uses: x.Hits, Request: x.Request,
			Continued: x.Flags&abi.CandidateContinued != 0}
		if x.From != abi.NoLevel {
			now.Asked.From = new(x.From)
		}
		now.role, now.Time, now.Request = abi.RoleAdmit, time.Duration(x.Time), max(now.Request, x.Request)
		if c.Query == nil {
			now.Admitted = new(c.Admitted[i])
		}
	}
	if c.Query != nil {
		for _, r := range c.Roots {
			now.Roots = append(now.Roots, [2]uint64{r.Capacity, r.Free})
		}
		if now.role, now.Path = abi.RolePlace, string(c.Path); c.Root != abi.None {
			now.Root = &c.Root
		}
	}
	if c.Geometry != nil {
		now.role, now.Pages = abi.RoleLayout, bench.Shapes[c.Geometry.Group].Title
		for _, r := range c.Segments {
			now.Segments = append(now.Segments, [6]uint32{r.Plane, r.Block, r.Blocks, r.PageOff, r.PageLen, r.Gap})
		}
	}
	if c.Err != nil {
		now.Error = c.Err.Error()
	}
	err := s.show(decides)
	if decides && s.until > 0 && now.Decision >= s.until {
		err = errors.Join(err, errStepped)
	}
	*now = stepCall{Decision: now.Decision, Request: now.Request, Time: now.Time, Hits: now.Hits, Misses: now.Misses, Evicted: now.Evicted}
	return err
}

func (s *stepper) learn(ev *abi.Event) {
	now, row := &s.call, stepRow{What: ev.Op.String()}
	if ev.Op != abi.OpRequestEnd {
		row.Slot, row.Chunk, row.Depth, row.Request = new(ev.Slot), new(sim.HashID(ev.Key)), ev.Depth, ev.Request
		now.Request, now.Time = ev.Request, time.Duration(ev.Time)
		if ev.Parent != abi.None {
			row.Parent = new(ev.Parent)
		}
	}
	switch now.Events = append(now.Events, row); ev.Op {
	case abi.OpInsert:
		now.Misses++
		s.slots[ev.Slot] = row
	case abi.OpTouch:
		now.Hits++
		row.Uses = s.slots[ev.Slot].Uses + 1
		s.slots[ev.Slot] = row
	case abi.OpRemove:
		now.Evicted++
		delete(s.slots, ev.Slot)
	}
}

// show prints the call. After a decision it waits for a key.
func (s *stepper) show(decides bool) error {
	wants := func(what string) bool { return len(s.only) == 0 || slices.Contains(s.only, what) }
	now, next := s.call, s.call.Decision
	if !decides {
		next++ // the following events belong to the next decision
	}
	if !wants("events") {
		now.Events = nil
	}
	if !wants("log") {
		now.Log = nil
	}
	line := decides && wants(now.role.String()) || now.Error != ""
	if now.Error == "" && (next < s.from || !line && len(now.Events)+len(now.Log) == 0) {
		return nil
	}
	if s.json {
		return json.NewEncoder(s.out).Encode(now)
	}
	for _, e := range now.Events {
		fmt.Fprintf(s.out, "  %s\n", &e)
	}
	if line {
		fmt.Fprintln(s.out, &now)
	}
	for _, x := range now.Segments[:min(len(now.Segments), 4)] {
		fmt.Fprintf(s.out, "  plane %d, blocks from %d: %d, bytes of each page from %d: %d, gap %d\n", x[0], x[1], x[2], x[3], x[4], x[5])
	}
	for _, text := range now.Log {
		fmt.Fprintf(s.out, "  log: %s\n", text)
	}
	if !line || s.keys == nil {
		return nil
	}
	if s.ahead > 1 {
		s.ahead--
		return nil
	}
	if err := s.out.Flush(); err != nil || !s.keys.Scan() || s.keys.Text() == "q" {
		return errors.Join(errStepped, err)
	}
	s.ahead, _ = strconv.ParseUint(s.keys.Text(), 10, 64) // any other input counts as 1
	return nil
}

func (e *stepRow) String() string {
	text := e.What
	if e.Slot != nil {
		text += fmt.Sprintf(" slot %d", *e.Slot)
	}
	if e.Chunk != nil {
		text += fmt.Sprintf(", chunk %d, depth %d", *e.Chunk, e.Depth)
	}
	if e.Parent != nil {
		text += fmt.Sprintf(" after slot %d", *e.Parent)
	}
	if e.Request > 0 {
		text += fmt.Sprintf(", request %d", e.Request)
	}
	return text
}

func (c *stepCall) String() string {
	text := fmt.Sprintf("#%d request %d at %v: ", c.Decision, c.Request, c.Time)
	switch x := c.Asked; {
	case c.Error != "":
		text += "failed: " + c.Error
	case c.role == abi.RoleLayout:
		text = fmt.Sprintf("#%d %s: %d segments", c.Decision, c.Pages, len(c.Segments))
	case c.role == abi.RolePlace:
		text += x.String() + ": "
		for i, r := range c.Roots {
			text += fmt.Sprintf("root %d is %.0f %% full, ", i, 100-100*float64(r[1])/float64(r[0]))
		}
		if c.Root != nil {
			text += fmt.Sprintf("to root %d", *c.Root)
		} else {
			text += "to the emptiest"
		}
		text += ", path " + cmp.Or(c.Path, "of the host's own")
	case x != nil:
		text += fmt.Sprintf("%s, to level %d", x, x.To)
		if x.From != nil {
			text += fmt.Sprintf(" from %d with %d hits", *x.From, x.Uses)
		}
		text += map[bool]string{true: ": yes", false: ": no"}[*c.Admitted]
	case len(c.Victims) == 0:
		text += "names none: the chunk is not stored"
	}
	for _, v := range c.Victims {
		if text += v.String(); v.Chunk == nil {
			text += ", which is empty: the chunk is not stored"
		} else {
			text += fmt.Sprintf(", %d uses", v.Uses)
		}
	}
	if c.role == abi.RoleEvict {
		text += fmt.Sprintf("; %d resident, %d hits, %d misses, %d evicted", c.Resident, c.Hits, c.Misses, c.Evicted)
	}
	return text + fmt.Sprintf("; %d of %d fuel, %v", c.Fuel, c.Allowed, c.Took)
}

// writeProfile prints the functions that used the most fuel, for each export.
func writeProfile(out io.Writer, functions []sandbox.FunctionFuel) {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	for len(functions) > 0 {
		n, sum := 0, uint64(0)
		for ; n < len(functions) && functions[n].Export == functions[0].Export; n++ {
			sum += functions[n].Fuel
		}
		fmt.Fprintf(w, "\n%s: %d fuel\nown\twith calls\tcalls\tfuel\t\n", functions[0].Export, sum)
		for _, f := range functions[:min(n, 12)] {
			percent := 100 / float64(max(1, sum))
			fmt.Fprintf(w, "%.1f %%\t%.1f %%\t%d\t%d\t  %s\n", percent*float64(f.Fuel), percent*float64(f.Whole), f.Calls, f.Fuel, f.Function)
		}
		functions = functions[n:]
	}
	w.Flush()
}
