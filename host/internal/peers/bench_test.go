package peers

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	protobuf "google.golang.org/protobuf/proto"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/testkit/storetest"
	"github.com/kvhost/kvhost/host/kv"
	"github.com/kvhost/kvhost/staging"
)

// BenchmarkPromise looks 1,000 keys up, and asks the table for what is missing. Of the keys the first half is here, or all of them, or
// none; without the table, and with one that has 8 or 64 peers of 100,000 entries, none with what is missing.
func BenchmarkPromise(b *testing.B) {
	p, err := New(Config{})
	testenv.OK(b, err)
	s, err := store.Open(b.Context(), store.Config{Roots: []store.RootConfig{{Path: b.TempDir(), Capacity: 1 << 30, MaxEntries: 1 << 12}, p.Root(1)}})
	testenv.OK(b, err)
	b.Cleanup(func() { testenv.NoError(b, errors.Join(s.Close(), p.CloseFiles())) })
	pool, err := staging.NewSlots(1, 1<<20)
	testenv.OK(b, err)
	b.Cleanup(func() { testenv.NoError(b, pool.Close()) })
	ns := space()
	byMembership := space()
	byMembership.Model, byMembership.Groups[0].Lookup = "members", kv.ByMembership
	random := rand.New(rand.NewPCG(5, 6))
	for _, n := range []*kv.Namespace{ns, byMembership} {
		space, err := s.Namespace(b.Context(), n)
		testenv.OK(b, err)
		keys := make([]kv.Key, 1000)
		for i := range keys {
			binary.LittleEndian.PutUint64(keys[i][:], random.Uint64())
			if i < len(keys)/2 {
				put, err := s.Put(b.Context(), store.PutRequest{Namespace: space, Key: keys[i], Rank: 0})
				testenv.OK(b, err)
				testenv.OK(b, storetest.WritePut(b.Context(), pool, put, make([]byte, put.Plan().PayloadBytes())))
				testenv.OK(b, put.Publish(b.Context()))
			}
		}
		for _, hosts := range []int{0, 8, 64} {
			for p.table.taken.Load() != 0 {
				p.table = Table{}
			}
			p.usable.Store(0)
			for range hosts {
				list, _ := p.table.open()
				for range 100_000 {
					p.table.add(random.Uint64(), list)
				}
				p.usable.Or(1 << list)
			}
			for _, of := range []string{"half", "none", "all"} {
				some := map[string][]kv.Key{"half": keys, "none": keys[len(keys)/2:], "all": keys[:len(keys)/2]}[of]
				b.Run(fmt.Sprintf("%s/%s here/%d peers", n.Model, of, hosts), func(b *testing.B) {
					b.ReportAllocs()
					q := store.LookupRequest{Namespace: space, Keys: some, Ranks: 1}
					for b.Loop() {
						l, err := s.Lookup(q)
						testenv.OK(b, err)
						if p.Promise(&q, l, n.Groups[0].Lookup == kv.ByPrefix, nil) != nil {
							b.Fatal("a promise of what no peer has")
						}
						l.Release()
					}
				})
			}
		}
	}
}

// BenchmarkTable is what a table with so many entries of one peer takes, when another has an eighth of them, too. Each round is a second of
// a peer that stores 1,000 chunks and evicts as many, in its ten messages, and then 1,000 keys of no entry.
func BenchmarkTable(b *testing.B) {
	const stores, messages, absent = 1000, 10, 1000
	for _, entries := range []int{1e6, 1e7} {
		b.Run(fmt.Sprint(entries), func(b *testing.B) {
			random := rand.New(rand.NewPCG(7, 8))
			table := &Table{}
			table.open()
			table.open()
			prints := make([]uint64, entries)
			since := time.Now()
			for i := range prints {
				prints[i] = random.Uint64()
				if table.add(prints[i], 0); i%8 == 0 {
					table.add(prints[i], 1)
				}
			}
			told := time.Since(since)
			var sent, wrong int
			var learned, looked time.Duration
			for b.Loop() {
				for range messages {
					m := &proto.ResidentsResponse{}
					for range stores / messages {
						at := random.IntN(entries)
						m.Removed = binary.LittleEndian.AppendUint64(m.Removed, prints[at])
						prints[at] = random.Uint64()
						m.Added = binary.LittleEndian.AppendUint64(m.Added, prints[at])
					}
					sent += protobuf.Size(m)
					since := time.Now()
					testenv.OK(b, table.learn(0, m.GetAdded(), m.GetRemoved()))
					learned += time.Since(since)
				}
				since := time.Now()
				for range absent {
					if table.at(random.Uint64()) != 0 {
						wrong++
					}
				}
				looked += time.Since(since)
			}
			n := float64(b.N)
			b.ReportMetric(float64(table.cells.Load()*cellBytes)/float64(entries), "B/entry")
			b.ReportMetric(float64(sent)/n, "B/s-sent")
			b.ReportMetric(float64(learned)/n/1e3, "µs-of-a-second")
			b.ReportMetric(float64(looked)/n/absent, "ns/absent-key")
			b.ReportMetric(float64(wrong)/n, "false/1000")
			b.ReportMetric(float64(table.full.Load()), "dropped")
			b.ReportMetric(told.Seconds(), "s-whole")
		})
	}
}
