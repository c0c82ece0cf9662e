package abi

import (
	"bytes"
	"encoding/hex"
	"flag"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
	"unsafe"

	"github.com/kvhost/kvhost/abi/testenv"
)

var rewrite = flag.Bool("rewrite", false, "write the golden files anew")

// records are all records of the contract with the sizes that the package announces.
var records = []struct {
	value any
	size  int
}{
	{Event{}, EventSize}, {RequestEnd{}, RequestEndSize}, {Info{}, InfoSize}, {Ask{}, AskSize}, {Candidate{}, CandidateSize},
	{PlaceQuery{}, PlaceQuerySize}, {PlaceAnswer{}, PlaceAnswerSize}, {RootsHeader{}, RootsHeaderSize}, {RootFacts{}, RootFactsSize},
	{LayoutHeader{}, LayoutHeaderSize}, {Plane{}, PlaneSize}, {Segment{}, SegmentSize},
}

// golden compares text with a file, or writes it.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := "testdata/" + name
	if *rewrite {
		testenv.OK(t, os.WriteFile(path, []byte(got), 0o644))
		return
	}
	want, err := os.ReadFile(path)
	testenv.OK(t, err)
	if got != string(want) {
		t.Errorf("%s differs; a layout that was published never changes, it only grows at its end. Got:\n%s", path, got)
	}
}

// The layouts: a published offset never changes.
func TestLayouts(t *testing.T) {
	var b strings.Builder
	for _, r := range records {
		v := reflect.TypeOf(r.value)
		if int(v.Size()) != r.size {
			t.Errorf("%s has %d bytes, its constant says %d", v.Name(), v.Size(), r.size)
		}
		fmt.Fprintf(&b, "%s %d bytes\n", v.Name(), v.Size())
		end := uintptr(0)
		for i := range v.NumField() {
			f := v.Field(i)
			if f.Offset != end {
				t.Errorf("%s.%s: %d bytes of padding that are not written out", v.Name(), f.Name, f.Offset-end)
			}
			end = f.Offset + f.Type.Size()
			if f.IsExported() {
				fmt.Fprintf(&b, "  %3d %-10s %s\n", f.Offset, f.Type, f.Name)
			}
		}
		if end != v.Size() || v.Size()%uintptr(v.Align()) != 0 {
			t.Errorf("%s ends at %d of %d", v.Name(), end, v.Size())
		}
	}
	golden(t, "layouts.txt", b.String())
}

// fill sets every byte of a field to a value of its own, so that swapped or moved fields show.
func fill(v reflect.Value, next *byte) {
	for i := range v.NumField() {
		f := v.Field(i)
		n := f.Type().Size()
		if !v.Type().Field(i).IsExported() {
			*next += byte(n)
			continue
		}
		b := unsafe.Slice((*byte)(f.Addr().UnsafePointer()), n)
		for j := range b {
			b[j] = *next
			*next++
		}
	}
}

// unsafeBytes are a record's bytes in memory.
func unsafeBytes(p reflect.Value) []byte {
	return unsafe.Slice((*byte)(p.UnsafePointer()), p.Elem().Type().Size())
}

// The bytes of each record with every field set, as a guest in another language would have to write or read them.
func TestGoldenBytes(t *testing.T) {
	var b strings.Builder
	for _, r := range records {
		p := reflect.New(reflect.TypeOf(r.value))
		next := byte(1)
		fill(p.Elem(), &next)
		fmt.Fprintf(&b, "%s\n%s", p.Elem().Type().Name(), hex.Dump(unsafeBytes(p)))
	}
	example := Event{
		Slot: 7, Parent: None, Key: 0x1122334455667788, Size: 512, Depth: 0, Request: 9, Tenant: 3, Op: OpInsert, Time: 1_000_000_000,
	}
	fmt.Fprintf(&b, "Event insert\n%s", hex.Dump(unsafe.Slice((*byte)(unsafe.Pointer(&example)), EventSize)))
	golden(t, "bytes.txt", b.String())
}

// Numbers that guests compile in.
func TestNumbers(t *testing.T) {
	var b strings.Builder
	for op := OpInsert; op <= OpRequestEnd; op++ {
		fmt.Fprintf(&b, "op %d %s\n", op, op)
	}
	for r := range Roles {
		fmt.Fprintf(&b, "role %d %s exports %s\n", r, r, strings.Join(r.Exports(), " "))
		if back, err := ParseRole(r.String()); err != nil || back != r {
			t.Errorf("%s parses as %v, %v", r, back, err)
		}
	}
	fmt.Fprintf(&b, "status ok %d default %d bad_input %d no_space %d internal %d\n", StatusOK, StatusDefault, StatusBadInput, StatusNoSpace, StatusInternal)
	fmt.Fprintf(&b, "buffer info %d events %d args %d result %d roots %d state %d\n", BufferInfo, BufferEvents, BufferArgs, BufferResult, BufferRoots, BufferState)
	fmt.Fprintf(&b, "level debug %d info %d warn %d error %d\n", LevelDebug, LevelInfo, LevelWarn, LevelError)
	fmt.Fprintf(&b, "kind new %d demotion %d promotion %d no_level %#x peer_level %#x\n", KindNew, KindDemotion, KindPromotion, NoLevel, PeerLevel)
	fmt.Fprintf(&b, "flag parent_resident %#x continued %#x last %#x room %#x\n", CandidateParentResident, CandidateContinued,
		CandidateLast, CandidateRoom)
	fmt.Fprintf(&b, "feature hints %#x levels %#x\n", FeatureHints, FeatureLevels)
	fmt.Fprintf(&b, "none %#x size_unit %d marker %s\n", None, SizeUnit, ExportMarker)
	golden(t, "numbers.txt", b.String())
}

func TestPack(t *testing.T) {
	for _, c := range []struct {
		s    Status
		n    uint32
		want uint64
	}{
		{StatusOK, 0, 0}, {StatusOK, 0xffffffff, 0xffffffff}, {StatusDefault, 0, 1 << 32}, {StatusBadInput, 0, 0xffffffff00000000},
		{StatusInternal, 5, 0xfffffffd00000005},
	} {
		if got := Pack(c.s, c.n); got != c.want {
			t.Errorf("Pack(%d, %d) = %#x, want %#x", c.s, c.n, got, c.want)
		}
		if s, n := Unpack(c.want); s != c.s || n != c.n {
			t.Errorf("Unpack(%#x) = %d, %d", c.want, s, n)
		}
	}
}

// SPEC.md is the text that guests in other languages are written from: it must hold every name and layout.
func TestSpecIsComplete(t *testing.T) {
	spec, err := os.ReadFile("SPEC.md")
	testenv.OK(t, err)
	for _, name := range []string{
		ExportMarker, ExportMemory, ExportInitialize, ExportBuffer, ExportInit, ExportNamespace, ExportEvents, ExportStep, ExportAdmit,
		ExportPlace, ExportLayout, ExportSave, ExportLoad, ImportModule, ImportLogEnabled, ImportLog, ImportFail,
		ImportNow, ImportCounterAdd, ImportRand, ImportWASI, ManifestSection, GrantClock, GrantMetrics, GrantRandom, GrantWASIStub,
	} {
		if !bytes.Contains(spec, []byte("`"+name)) {
			t.Errorf("SPEC.md does not mention `%s`", name)
		}
	}
	for _, r := range records {
		v := reflect.TypeOf(r.value)
		if want := fmt.Sprintf("### %s (%d bytes)", v.Name(), v.Size()); !bytes.Contains(spec, []byte(want)) {
			t.Errorf("SPEC.md has no heading %q", want)
			continue
		}
		_, rest, _ := strings.Cut(string(spec), fmt.Sprintf("### %s (%d bytes)", v.Name(), v.Size()))
		table, _, _ := strings.Cut(rest, "\n### ")
		for i := range v.NumField() {
			if f := v.Field(i); f.IsExported() {
				if row := fmt.Sprintf("| %d | %s | %s |", f.Offset, specType(f.Type), snake(f.Name)); !strings.Contains(table, row) {
					t.Errorf("SPEC.md: %s lacks the row %q", v.Name(), row)
				}
			}
		}
	}
}

func specType(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Int32:
		return "i32"
	case reflect.Array:
		return fmt.Sprintf("u8[%d]", t.Len())
	default:
		return fmt.Sprintf("u%d", 8*t.Size())
	}
}

func snake(s string) string {
	if s == "ID" || s == "ABI" {
		return strings.ToLower(s)
	}
	s = strings.Replace(s, "MS", "Ms", 1)
	var b strings.Builder
	for i, c := range s {
		if c >= 'A' && c <= 'Z' && i > 0 {
			b.WriteByte('_')
		}
		b.WriteString(strings.ToLower(string(c)))
	}
	return b.String()
}
