package server

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvhost/kvhost/host/client"
	"github.com/kvhost/kvhost/host/internal/proto"
	"github.com/kvhost/kvhost/host/internal/store"
	"github.com/kvhost/kvhost/host/internal/store/pieceformat"
	"github.com/kvhost/kvhost/host/kv"
)

// BenchmarkLookupAmongMany is how long clients wait for lookups of 1,000 keys that are all there, in a root of a million
// entries: the Go client's, beside the store's own part and the same messages through bare gRPC, and, where KVHOST_PYTHON names an
// interpreter with the kvhost package, the Python client's beside those.
func BenchmarkLookupAmongMany(b *testing.B) {
	const entries, asked = 1_000_000, 1000
	r := manyRig(b, entries)
	lists := make([][]kv.Key, 64)
	for i := range lists {
		for n := range asked {
			lists[i] = append(lists[i], key(i*(entries/asked/len(lists))*asked+n))
		}
	}
	b.Run("go", func(b *testing.B) {
		p := r.dial(nil)
		percentiles(b, func(n int) time.Duration {
			began := time.Now()
			l, err := p.Lookup(b.Context(), client.LookupRequest{Keys: lists[n%len(lists)]})
			took := time.Since(began)
			if err != nil || l.Hits() != asked {
				b.Fatal(l.Hits(), err)
			}
			if err := l.Release(b.Context()); err != nil {
				b.Fatal(err)
			}
			return took
		})
	})
	b.Run("store alone", func(b *testing.B) {
		ns := testNamespace()
		space, err := r.store.Namespace(b.Context(), &ns)
		if err != nil {
			b.Fatal(err)
		}
		percentiles(b, func(n int) time.Duration {
			began := time.Now()
			l, err := r.store.Lookup(store.LookupRequest{Namespace: space, Keys: lists[n%len(lists)], Ranks: 1})
			took := time.Since(began)
			if err != nil || l.Hits() != asked {
				b.Fatal(l.Hits(), err)
			}
			l.Release()
			return took
		})
	})
	b.Run("bare gRPC", func(b *testing.B) { bareLookups(b, lists) })
	python := os.Getenv("KVHOST_PYTHON")
	if python == "" {
		b.Log("KVHOST_PYTHON is not set: the Python client is not measured")
		return
	}
	var orders struct {
		Socket string     `json:"socket"`
		Lists  [][]string `json:"lists"`
	}
	orders.Socket = r.socket
	for _, list := range lists {
		var names []string
		for _, k := range list {
			names = append(names, hex.EncodeToString(k[:]))
		}
		orders.Lists = append(orders.Lists, names)
	}
	in, err := json.Marshal(&orders)
	if err != nil {
		b.Fatal(err)
	}
	script := os.Getenv("KVHOST_LOOKUPS") // where the sources are not
	if script == "" {
		script = "../../client/python/tests/lookups.py"
	}
	cmd := exec.CommandContext(b.Context(), python, script)
	var out, log bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(in), &out, &log
	if err := cmd.Run(); err != nil {
		b.Fatalf("run %s: %v\n%s", python, err, log.String())
	}
	b.Log("Python:\n" + out.String())
}

// percentiles reports how long what ask measures takes.
func percentiles(b *testing.B, ask func(n int) time.Duration) {
	var took []time.Duration
	for n := 0; b.Loop(); n++ {
		took = append(took, ask(n))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Nanoseconds())/1e3, "p50-µs")
	b.ReportMetric(float64(took[len(took)*99/100].Nanoseconds())/1e3, "p99-µs")
}

// bareLookups are the messages of lookups and of their replies, by a server that does nothing else.
func bareLookups(b *testing.B, lists [][]kv.Key) {
	socket := filepath.Join(b.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		b.Fatal(err)
	}
	g := grpc.NewServer(grpc.StaticStreamWindowSize(1<<20), grpc.StaticConnWindowSize(4<<20), grpc.ReadBufferSize(ioBuffer),
		grpc.WriteBufferSize(ioBuffer))
	proto.RegisterEngineServiceServer(g, canned{})
	served := make(chan error, 1)
	go func() { served <- g.Serve(l) }()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithStaticStreamWindowSize(1<<20), grpc.WithStaticConnWindowSize(4<<20), grpc.WithReadBufferSize(ioBuffer),
		grpc.WithWriteBufferSize(ioBuffer))
	if err != nil {
		b.Fatal(err)
	}
	defer func() {
		conn.Close()
		g.Stop()
		<-served
	}()
	stream, err := proto.NewEngineServiceClient(conn).Session(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	percentiles(b, func(n int) time.Duration {
		keys := proto.PackKeys(lists[n%len(lists)], kv.KeyBytes)
		began := time.Now()
		err := stream.Send(&proto.SessionRequest{Id: uint64(n), Body: &proto.SessionRequest_Lookup{Lookup: &proto.Lookup{Keys: keys}}})
		if err == nil {
			_, err = stream.Recv()
		}
		if err != nil {
			b.Fatal(err)
		}
		return time.Since(began)
	})
}

// canned is a host that answers each lookup alike.
type canned struct {
	proto.UnimplementedEngineServiceServer
}

func (canned) Session(s grpc.BidiStreamingServer[proto.SessionRequest, proto.SessionResponse]) error {
	for {
		m, err := s.Recv()
		if err != nil {
			return nil
		}
		reply := &proto.LookupReply{Hits: 1000, Lease: m.Id, Bytes: 1 << 30, LoadTime: durationpb.New(time.Millisecond)}
		if err := s.Send(&proto.SessionResponse{Id: m.Id, Body: &proto.SessionResponse_Lookup{Lookup: reply}}); err != nil {
			return nil
		}
	}
}

// manyRig is a host that has started from a checkpoint of so many entries. Those whose files a start looks at have files.
func manyRig(b *testing.B, entries int) *rig {
	root := filepath.Join(b.TempDir(), "root")
	at := func(_ *Config, s *store.Config) {
		s.Roots[0].Path, s.Roots[0].Capacity, s.Roots[0].MaxEntries = root, 1<<40, uint32(entries+8)
	}
	r := newRig(b, at)
	p := r.dial(nil)
	step := entries / store.SampledEntries
	for n := step - 1; n < entries; n += step {
		p.fill(n, 0)
		if res, err := p.store([]client.StoreChunk{{Key: key(n), Blocks: blocks(0)}}); err != nil || res.Chunks[0].Result != client.Stored {
			b.Fatal(res, err)
		}
	}
	r.stop()
	if err := <-r.served; err != nil {
		b.Fatal(err)
	}
	r.served <- nil // for the end of the benchmark
	if err := r.store.Close(); err != nil {
		b.Fatal(err)
	}
	fillCheckpoint(b, filepath.Join(root, strings.TrimPrefix(pieceformat.CheckpointFile, "/")), entries)
	r = newRig(b, at)
	if st := r.store.Stats().Roots[0]; st.Entries != entries {
		b.Fatalf("%d entries after the start, want %d", st.Entries, entries)
	}
	return r
}

// fillCheckpoint makes a checkpoint one of so many entries, all like its first.
func fillCheckpoint(b *testing.B, file string, entries int) {
	f, err := os.OpenFile(file, os.O_RDWR, 0)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		b.Fatal(err)
	}
	var c copied
	head, err := pieceformat.ReadCheckpoint(f, info.Size(), &c)
	if err != nil {
		b.Fatal(err)
	}
	head.High, head.Clock, head.Entries = uint32(entries), uint32(entries), uint32(entries)
	err = pieceformat.WriteCheckpoint(f, head, c.owners, func(yield func(*pieceformat.CheckpointEntry) bool) {
		e := c.entry
		for n := range uint32(entries) {
			e.Slot, e.LastTouch, e.Depth, e.Key, e.Parent = n, n+1, uint16(n%1000), key(int(n)), 0
			if n%1000 > 0 {
				e.Parent = kv.Fingerprint(c.owners[e.OwnerID].Namespace, 0, key(int(n)-1))
			}
			if !yield(&e) {
				return
			}
		}
	})
	if err != nil {
		b.Fatal(err)
	}
}

// copied is what a checkpoint has in common for all entries.
type copied struct {
	owners []pieceformat.CheckpointOwner
	entry  pieceformat.CheckpointEntry
}

func (c *copied) Head(pieceformat.Checkpoint) error { return nil }

func (c *copied) Owner(o *pieceformat.CheckpointOwner) error {
	c.owners = append(c.owners, *o)
	return nil
}

func (c *copied) Entry(e *pieceformat.CheckpointEntry) error {
	c.entry = *e
	return nil
}
