package abi

import (
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/tetratelabs/wazero"

	"github.com/kvhost/kvhost/abi/testenv"
)

// sdk is a kit in another language. Its records are tested with a program in that language, written here from the golden
// files: for every record a function that reads each field and one that writes each. What the fields are called follows
// from Go's names.
type sdk struct {
	name   string
	source func(*strings.Builder)
	build  func(t *testing.T, text, out string) *exec.Cmd
	tool   *testenv.Tool
}

var sdks = []sdk{
	{"c", cSource, buildC, testenv.Clang},
	{"rust", rustSource, buildRust, testenv.Cargo},
}

func write(t *testing.T, path, text string) {
	t.Helper()
	testenv.OK(t, os.MkdirAll(filepath.Dir(path), 0o755))
	testenv.OK(t, os.WriteFile(path, []byte(text), 0o644))
}

func buildC(t *testing.T, text, out string) *exec.Cmd {
	source := filepath.Join(t.TempDir(), "golden.c")
	write(t, source, text)
	return exec.Command("clang", "--target=wasm32", "-O2", "-mbulk-memory", "-nostdlib", "-ffreestanding", "-Wall", "-Wextra", "-Werror",
		"-Ic", "-Wl,--no-entry", "-o", out, source)
}

func buildRust(t *testing.T, text, out string) *exec.Cmd {
	dir := t.TempDir()
	kit, err := filepath.Abs("rust")
	testenv.OK(t, err)
	write(t, filepath.Join(dir, "src", "lib.rs"), text)
	write(t, filepath.Join(dir, "Cargo.toml"), fmt.Sprintf("[package]\nname = \"golden\"\nversion = \"0.0.0\"\nedition = \"2018\"\n"+
		"[lib]\ncrate-type = [\"cdylib\"]\n[dependencies]\nkvhost = { path = %q }\n[profile.release]\npanic = \"abort\"\n", kit))
	cmd := exec.Command("sh", "-c", `cargo build --offline --quiet --release --target wasm32-unknown-unknown && cp target/wasm32-unknown-unknown/release/golden.wasm "$0"`, out)
	cmd.Dir = dir
	return cmd
}

// field is a record's field as the program sees it: value is what the golden bytes hold there.
type field struct {
	name  string
	value uint64
	bytes []byte // of an array
}

// goldenFields are the fields of a record, filled as the golden bytes have them.
func goldenFields(value any) (golden []byte, fields []field) {
	p := reflect.New(reflect.TypeOf(value))
	next := byte(1)
	fill(p.Elem(), &next)
	golden = unsafeBytes(p)
	for i := range p.Elem().NumField() {
		f := p.Elem().Type().Field(i)
		if !f.IsExported() {
			continue
		}
		at := golden[f.Offset : f.Offset+f.Type.Size()]
		if f.Type.Kind() == reflect.Array {
			fields = append(fields, field{name: f.Name, bytes: at})
			continue
		}
		var v uint64
		for j, b := range at {
			v |= uint64(b) << (8 * j)
		}
		fields = append(fields, field{name: f.Name, value: v})
	}
	return golden, fields
}

// names are the numbers that guests compile in, by Go's names.
var names = []struct {
	name  string
	value int64
}{
	{"OpInsert", int64(OpInsert)}, {"OpTouch", int64(OpTouch)}, {"OpRemove", int64(OpRemove)}, {"OpLink", int64(OpLink)},
	{"OpPin", int64(OpPin)}, {"OpUnpin", int64(OpUnpin)}, {"OpResident", int64(OpResident)}, {"OpRequestEnd", int64(OpRequestEnd)},
	{"Default", int64(StatusDefault)}, {"BadInput", int64(StatusBadInput)}, {"NoSpace", int64(StatusNoSpace)}, {"Internal", int64(StatusInternal)},
	{"BufferInfo", BufferInfo}, {"BufferEvents", BufferEvents}, {"BufferArgs", BufferArgs}, {"BufferResult", BufferResult},
	{"BufferRoots", BufferRoots}, {"BufferState", BufferState},
	{"LevelDebug", LevelDebug}, {"LevelInfo", LevelInfo}, {"LevelWarn", LevelWarn}, {"LevelError", LevelError},
	{"KindNew", int64(KindNew)}, {"KindDemotion", int64(KindDemotion)}, {"KindPromotion", int64(KindPromotion)},
	{"ParentResident", CandidateParentResident}, {"Continued", CandidateContinued}, {"Last", CandidateLast}, {"Room", CandidateRoom}, {"NoLevel", NoLevel},
	{"PeerLevel", PeerLevel}, {"FeatureHints", FeatureHints}, {"FeatureLevels", FeatureLevels},
	{"None", int64(None)}, {"SizeUnit", SizeUnit},
}

func cSource(b *strings.Builder) {
	b.WriteString("#include \"kvhost.h\"\nstatic uint64_t room[32];\nKV_EXPORT(\"scratch\") void *scratch(void) { return room; }\n")
	for i, n := range names {
		fmt.Fprintf(b, "_Static_assert((int64_t)KV_%s == %d, \"number %d\");\n", strings.ToUpper(snake(n.name)), n.value, i)
	}
	for _, r := range records {
		name := reflect.TypeOf(r.value).Name()
		_, fields := goldenFields(r.value)
		var check, write strings.Builder
		for i, f := range fields {
			if f.bytes != nil {
				for j, c := range f.bytes {
					fmt.Fprintf(&check, "  if (r->%s[%d] != %d) return %d;\n", snake(f.name), j, c, i+1)
					fmt.Fprintf(&write, "  r->%s[%d] = %d;\n", snake(f.name), j, c)
				}
				continue
			}
			fmt.Fprintf(&check, "  if (r->%s != 0x%xull) return %d;\n", snake(f.name), f.value, i+1)
			fmt.Fprintf(&write, "  r->%s = 0x%xull;\n", snake(f.name), f.value)
		}
		kind := "kv_" + snake(name)
		fmt.Fprintf(b, "_Static_assert(sizeof(%s) == %d, \"size\");\n", kind, r.size)
		fmt.Fprintf(b, "KV_EXPORT(\"check_%s\") int check_%s(const %s *r) {\n%s  return 0;\n}\n", name, name, kind, check.String())
		fmt.Fprintf(b, "KV_EXPORT(\"write_%s\") void write_%s(%s *r) {\n%s}\n", name, name, kind, write.String())
	}
}

func rustSource(b *strings.Builder) {
	b.WriteString("#![no_std]\n#[panic_handler]\nfn panic(_: &core::panic::PanicInfo) -> ! { loop {} }\n")
	b.WriteString("static mut ROOM: [u64; 32] = [0; 32];\n#[no_mangle]\npub extern \"C\" fn scratch() -> usize { unsafe { core::ptr::addr_of_mut!(ROOM) as usize } }\n")
	for i, n := range names {
		path, name, _ := strings.Cut(strings.ToUpper(snake(n.name)), "_")
		switch path {
		case "OP", "BUFFER", "KIND":
			path = strings.ToLower(path) + "::" + name
		case "LEVEL":
			path = "Level::" + strings.TrimPrefix(n.name, "Level")
		default:
			path = strings.ToUpper(snake(n.name))
		}
		fmt.Fprintf(b, "const _N%d: [(); %d] = [(); (kvhost::%s as i64 & 0xffff_ffff) as usize];\n", i, n.value&0xffffffff, path)
	}
	for _, r := range records {
		name := reflect.TypeOf(r.value).Name()
		_, fields := goldenFields(r.value)
		var check, write strings.Builder
		for i, f := range fields {
			value := fmt.Sprintf("0x%x", f.value)
			if f.bytes != nil {
				value = strings.ReplaceAll(fmt.Sprint(f.bytes), " ", ", ")
			}
			fmt.Fprintf(&check, "  if r.%s != %s { return %d; }\n", snake(f.name), value, i+1)
			fmt.Fprintf(&write, "  r.%s = %s;\n", snake(f.name), value)
		}
		fmt.Fprintf(b, "#[no_mangle]\npub extern \"C\" fn check_%s(r: &kvhost::%s) -> u32 {\n%s  0\n}\n", name, name, check.String())
		fmt.Fprintf(b, "#[no_mangle]\npub extern \"C\" fn write_%s(r: &mut kvhost::%s) {\n%s}\n", name, name, write.String())
	}
}

// Each kit reads and writes every field where the golden bytes have it, and nothing else.
func TestKitsReadAndWriteTheGoldenBytes(t *testing.T) {
	for _, kit := range sdks {
		t.Run(kit.name, func(t *testing.T) {
			testenv.Need(t, kit.tool)
			var text strings.Builder
			kit.source(&text)
			out := filepath.Join(t.TempDir(), "golden.wasm")
			if msg, err := kit.build(t, text.String(), out).CombinedOutput(); err != nil {
				t.Fatalf("building with the kit: %v\n%s", err, msg)
			}
			module, err := os.ReadFile(out)
			testenv.OK(t, err)
			judgeRecords(t, module)
		})
	}
}

func judgeRecords(t *testing.T, module []byte) {
	ctx := context.Background()
	runtime := wazero.NewRuntime(ctx)
	defer runtime.Close(ctx)
	m, err := runtime.Instantiate(ctx, module)
	testenv.OK(t, err)
	call := func(name string, args ...uint64) uint32 {
		r, err := m.ExportedFunction(name).Call(ctx, args...)
		if err != nil {
			t.Fatalf("calling %s: %v", name, err)
		}
		if len(r) == 0 {
			return 0
		}
		return uint32(r[0])
	}
	at := call("scratch")
	for _, r := range records {
		name := reflect.TypeOf(r.value).Name()
		golden, fields := goldenFields(r.value)
		m.Memory().Write(at, golden)
		if bad := call("check_"+name, uint64(at)); bad != 0 {
			t.Errorf("%s.%s reads wrong", name, fields[bad-1].name)
		}
		m.Memory().Write(at, make([]byte, r.size+8))
		call("write_"+name, uint64(at))
		got, _ := m.Memory().Read(at, uint32(r.size)+8)
		if want := slices.Concat(golden, make([]byte, 8)); !bytes.Equal(got, want) {
			t.Errorf("%s is written as\n%swant\n%s", name, hex.Dump(got), hex.Dump(want))
		}
	}
}
