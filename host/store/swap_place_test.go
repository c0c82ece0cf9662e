package store

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/policy"
	"github.com/kvhost/kvhost/host/store/pieceformat"
	"github.com/kvhost/kvhost/plugins/fanout"
	"github.com/kvhost/kvhost/staging"
	"github.com/kvhost/kvhost/staging/faultfs"
)

// TestSwapPlace keeps a place policy for as long as files have its names, over a restart too, and no longer.
func TestSwapPlace(t *testing.T) {
	flat := func() *policy.Handle { return use(t, "fanout", nil, policy.Config{fanout.ConfigWidths: "1/1/1"}) }
	deep := func() *policy.Handle { return use(t, "fanout", nil, policy.Config{fanout.ConfigWidths: "4/4"}) }
	f := newFixture(t, t.TempDir(), 6, 2, func(c *Config) { c.Policies.Place = flat() })
	f.mustPut(0, 1)
	before := f.files()
	if _, err := f.store.Swap(t.Context(),
		Swap{From: "fanout", Policies: [abi.Roles]*policy.Handle{abi.RolePlace: deep()}}); err != nil {
		t.Fatal(err)
	}
	f.mustPut(2, 3)
	for n := range uint64(4) {
		f.mustRead(n)
	}
	after := f.files()
	if len(after) != 2*len(before) {
		t.Errorf("%d files became %d", len(before), len(after))
	}
	places := func() string {
		var list []string
		for _, p := range f.store.Stats().Policies {
			if p.Role == abi.RolePlace {
				list = append(list, fmt.Sprintf("%s: %d files, replaced %t", p.Name, p.Files, p.Replaced))
			}
		}
		return strings.Join(list, "; ")
	}
	const both = "fanout: 2 files, replaced false; fanout: 2 files, replaced true"
	equal(t, "place policies", places(), both)
	f.cfg.Policies.Place = deep()
	f.restart()
	for n := range uint64(4) {
		f.mustRead(n)
	}
	equal(t, "place policies after a restart", places(), both)
	st := f.store.Stats().Roots[0]
	equal(t, "Renamed", st.Renamed, 0)
	equal(t, "Recovered", st.Recovered, 8)
	f.mustPut(4, 5, 6, 7) // evicts 0 and 1
	await(t, "the policy goes with the last of its files", func() bool {
		return places() == "fanout: 6 files, replaced false"
	})
	await(t, "its file goes after it", func() bool {
		kept, err := filepath.Glob(f.cfg.Roots[0].Path + "/" + pieceformat.PoliciesDir + "/*" + pieceformat.PlaceSuffix)
		return err == nil && len(kept) == 1
	})
	f.checkUsed()
}

// logged counts the warnings that a logger was given, by message.
type logged struct {
	slog.Handler
	mu   sync.Mutex
	seen map[string]int
}

func (l *logged) Enabled(context.Context, slog.Level) bool { return true }
func (l *logged) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l *logged) Handle(_ context.Context, r slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r.Level >= slog.LevelWarn {
		l.seen[r.Message]++
	}
	return nil
}

// TestReplacedPlacePolicyNotRemoved: the files of a place policy that has ended cannot be removed, and the log says so.
func TestReplacedPlacePolicyNotRemoved(t *testing.T) {
	faulty := faultfs.New(staging.OS())
	log := &logged{Handler: slog.DiscardHandler, seen: map[string]int{}}
	f := newFixture(t, t.TempDir(), 2, 1, func(c *Config) {
		c.FS, c.Log = faulty, slog.New(log)
		c.Policies.Place = use(t, "fanout", nil, policy.Config{fanout.ConfigWidths: "1/1/1"})
	})
	f.mustPut(0)
	faulty.Set(faultfs.MustRules("remove **/policies/*: eio")...)
	w := Swap{From: "fanout"}
	w.Policies[abi.RolePlace] = use(t, "fanout", nil, policy.Config{fanout.ConfigWidths: "4/4"})
	if _, err := f.store.Swap(t.Context(), w); err != nil {
		t.Fatal(err)
	}
	f.mustPut(1, 2, 3) // evicts 0, the last file with an old name
	await(t, "the log says so, once: the module is still used", func() bool {
		log.mu.Lock()
		defer log.mu.Unlock()
		return log.seen["file that nothing needs not removed; the next start tries again"] == 1
	})
}

// TestSwapWhilePut has a piece in flight, and a rank still to come, when its names and layout are replaced.
func TestSwapWhilePut(t *testing.T) {
	f := newFixture(t, t.TempDir(), 6, 2)
	first, err := f.store.Put(t.Context(), f.request(1, 1, 0))
	if err != nil {
		t.Fatal(err)
	}
	layout := policy.NativeModule("blocks", []abi.Role{abi.RoleLayout}, func(guest.Info) (any, error) {
		return blockMajor{}, nil
	})
	plan := f.space.Plan(0)
	for role, u := range map[abi.Role]*policy.Handle{
		abi.RolePlace: use(t, "fanout", nil, policy.Config{fanout.ConfigWidths: "4/4"}), abi.RoleLayout: handle(layout),
	} {
		w := Swap{From: map[abi.Role]string{abi.RolePlace: "fanout", abi.RoleLayout: "layermajor"}[role]}
		w.Policies[role] = u
		if _, err := f.store.Swap(t.Context(), w); err != nil {
			t.Fatal(err)
		}
	}
	if f.space.Plan(0).Digest() == plan.Digest() {
		t.Error("the layout is the old one")
	}
	if err := write(first); err != nil {
		t.Fatal(err)
	}
	if err := first.Publish(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := f.putUnder(1, 1, 1); err != nil {
		t.Fatal(err)
	}
	f.mustRead(1)
	f.mustPut(2)
	f.mustRead(2)
	f.restart()
	f.mustRead(1)
	f.mustRead(2)
	f.checkUsed()
}
