package store

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/zeebo/xxh3"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/guest"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/store/index"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

// image is everything that a restart must bring back: what stands in each slot, and the account.
func (f *fixture) image() (list []string) {
	r := f.root()
	r.Lock()
	defer r.Unlock()
	r.Index.Each(func(slot uint32, e *index.Entry) {
		list = append(list, fmt.Sprintf("%d %s parent %016x tick %d units %d depth %d ranks %x owed %x state %x tenant %d",
			slot, r.Index.Key(slot), e.Parent(), e.LastTouch(), r.Index.Units(slot), e.Depth(), r.Index.Pieces(slot),
			r.Index.Missing(slot),
			e.State()&^index.Announced, r.TenantOf(slot)))
	})
	return append(list, fmt.Sprintf("used %d complete %d high %d", r.Account.Figures().Used, r.Complete(), r.Index.High()))
}

// grown is a root with entries of several tenants, sizes and sets of ranks, some of them incomplete, with free slots
// between.
func grown(t *testing.T, change ...func(*Config)) *fixture {
	f := newFixture(t, 40, 2, change...)
	for n := range uint64(30) {
		for rank := range uint32(2) {
			if n%7 == 3 && rank == 1 {
				continue
			}
			q := f.request(n, n-1, rank)
			q.Tenant = uint32(n % 3)
			must(t, f.putAs(q))
		}
	}
	for _, n := range []uint64{2, 11, 29} {
		f.drop(n)
	}
	for _, n := range []uint64{16, 4, 9} {
		f.lookup(n).Release()
	}
	return f
}

// TestCheckpointBringsBackTheIndex compares the index before and after a restart that reads no piece: each entry in its
// slot, and the account as a scan finds it.
func TestCheckpointBringsBackTheIndex(t *testing.T) {
	f := grown(t)
	want := f.image()
	f.restart()
	st := f.store.Stats().Roots[0]
	if st.Scanned != 0 || st.Recovered == 0 {
		t.Fatalf("%d files scanned, %d pieces recovered", st.Scanned, st.Recovered)
	}
	if got := f.image(); !slices.Equal(got, want) {
		t.Errorf("after the restart\n%v\nbefore\n%v", got, want)
	}
	noError(t, f.idle())
	f.checkUsed()
	for _, n := range []uint64{0, 1, 4, 16, 28} {
		f.mustRead(n)
	}
	f.crash()
	scanned := f.store.Stats().Roots[0]
	if scanned.Scanned == 0 || scanned.Used != st.Used || scanned.Entries != st.Entries ||
		scanned.Complete != st.Complete {
		t.Errorf("the scan finds %+v, the checkpoint said %+v", scanned, st)
	}
}

// crash closes the store and makes it look as if it had not been.
func (f *fixture) crash() {
	f.Helper()
	must(f, f.store.Close())
	must(f, os.Remove(filepath.Join(f.cfg.Roots[0].Path, pieceformat.CheckpointFile)))
	f.start()
}

// TestCheckpointIsNotBelieved restarts with checkpoints that must not be gone by. The scan then finds what is there.
func TestCheckpointIsNotBelieved(t *testing.T) {
	for name, spoil := range map[string]func(t *testing.T, f *fixture, file, piece string){
		"a bit": func(t *testing.T, _ *fixture, file, _ string) {
			b, err := os.ReadFile(file)
			must(t, err)
			b[len(b)/2] ^= 4
			put(t, file, b)
		},
		"cut": func(t *testing.T, _ *fixture, file, _ string) {
			must(t, os.Truncate(file, 300))
		},
		"a file is gone": func(t *testing.T, _ *fixture, _, piece string) {
			must(t, os.Remove(piece))
		},
		"fewer slots": func(_ *testing.T, f *fixture, _, _ string) { f.cfg.Roots[0].MaxEntries = 28 },
		"now shared":  func(_ *testing.T, f *fixture, _, _ string) { f.cfg.Roots[0].Shared = true },
		"shared meanwhile": func(_ *testing.T, f *fixture, _, _ string) {
			f.cfg.Roots[0].Shared = true
			f.start()
			f.mustPut(34, 35)
			must(f, f.store.Close())
			f.cfg.Roots[0].Shared = false
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := grown(t)
			piece := f.pieceFile(0, 0)
			must(t, f.store.Close())
			spoil(t, f, filepath.Join(f.cfg.Roots[0].Path, pieceformat.CheckpointFile), piece)
			f.start()
			if st := f.store.Stats().Roots[0]; st.Scanned == 0 {
				t.Fatal("it was believed")
			}
			noError(t, f.idle())
			f.mustRead(1)
			if name == "shared meanwhile" {
				f.mustRead(35)
				f.checkUsed()
			}
		})
	}
}

// TestPolicyGoesOnFromItsState restarts under a policy that keeps the order of storing, which no order of touches
// tells.
func TestPolicyGoesOnFromItsState(t *testing.T) {
	told := 0
	module := policy.NativeModule("keeper", []abi.Role{abi.RoleEvict}, func(guest.Info) (any, error) {
		return &keeper{told: &told}, nil
	}).KeepState("keeper/1")
	f := grown(t, func(c *Config) { c.Policies.Evict = handle(module) })
	before := f.store.Stats().Roots[0].Entries
	told = 0
	f.restart()
	r := f.root()
	_ = r.Evictor.Flush()
	if told != 0 {
		t.Errorf("the policy was told of %d entries again", told)
	}
	must(t, f.store.Close())
	put(t, filepath.Join(r.Path, pieceformat.StateFile), []byte("nonsense"))
	f.start()
	_ = f.root().Evictor.Flush()
	if told != before {
		t.Errorf("the policy lost its state and was told of %d of %d entries", told, before)
	}
}

// keeper counts what it is told of, and says that it kept it.
type keeper struct{ told *int }

func (k *keeper) Events(batch []abi.Event) {
	for _, ev := range batch {
		if ev.Op == abi.OpResident {
			*k.told++
		}
	}
}
func (k *keeper) Victims(abi.Ask, []uint32) int              { return 0 }
func (k *keeper) Save(dst []byte, limit int) ([]byte, error) { return append(dst, "kept"...), nil }
func (k *keeper) Load(b []byte) error                        { return nil }

// FuzzCheckpoint reads files with the right checksums.
func FuzzCheckpoint(f *testing.F) {
	fp := func(_ uint16, k kv.Key) uint64 { return kv.Fingerprint(kv.Digest{}, 0, k) }
	plain := func() *index.Index { return index.New(64, fp, func(class uint16) uint16 { return class }) }
	x := plain()
	for n := range uint64(20) {
		k := kv.Key{byte(n), byte(n >> 1), 1, byte(n % 2 << 7), 31: byte(n % 3)}
		slot := x.Add(fp(5, k), index.Owner{Class: 5}, &k, n, uint32(n))
		x.SetPieces(slot, 1<<(n%64))
		x.Touch(slot)
	}
	var file memory
	must(f, writeCheckpoint(&file, x, 9, []pieceformat.CheckpointOwner{{Group: 1}}))
	f.Add([]byte(file))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= 64 {
			binary.LittleEndian.PutUint64(b[48:], xxh3.Hash(b[64:]))
			binary.LittleEndian.PutUint64(b[56:], xxh3.Hash(b[:56]))
		}
		y := plain()
		owner := func(*pieceformat.CheckpointOwner) (index.Owner, error) { return index.Owner{Class: 5}, nil }
		c, err := readCheckpoint(bytes.NewReader(b), int64(len(b)), y, owner)
		if err != nil {
			return
		}
		if y.Len() != c.Entries || y.High() != c.High {
			t.Fatalf("%d entries in %d slots, the head says %+v", y.Len(), y.High(), c)
		}
		must(t, y.Check())
	})
}

// memory is a file.
type memory []byte

func (m *memory) WriteAt(p []byte, off int64) (int, error) {
	for int64(len(*m)) < off+int64(len(p)) {
		*m = append(*m, 0)
	}
	return copy((*m)[off:], p), nil
}

// TestCheckpointDoesNotComeBack: a start has removed it durably before anything changes that it describes.
func TestCheckpointDoesNotComeBack(t *testing.T) {
	for seed := range uint64(10) {
		f, machine := onMachine(t, 40)
		f.mustPut(0, 1, 2)
		f.restart()
		must(t, machine.PowerLoss(seed))
		_, err := os.Stat(filepath.Join(f.cfg.Roots[0].Path, pieceformat.CheckpointFile))
		if !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the checkpoint of an earlier end, after a start and a loss of power: error %v, want %v", err, os.ErrNotExist)
		}
		f.kill()
	}
}
