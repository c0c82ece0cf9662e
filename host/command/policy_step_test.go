package command

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/internal/testkit/policytest"
	"github.com/kvhost/kvhost/host/internal/testkit/wasmtest"
)

// Three requests over a root of two chunks, by hand, and a real trace, by what the simulation counts.
func TestPolicyStep(t *testing.T) {
	dir := t.TempDir()
	text := ""
	for i, ids := range []string{"5,6", "5", "7"} {
		text += fmt.Sprintf(`{"timestamp":%d,"input_length":9,"output_length":1,"hash_ids":[%s]}`+"\n", 1000*i, ids)
	}
	testenv.OK(t, os.WriteFile(filepath.Join(dir, "t.jsonl"), []byte(text), 0o600))
	step := func(code int, wanted string, args ...string) string {
		return want(t, dir, code, wanted, append([]string{"policy", "step", "--trace", "t.jsonl", "--capacity", "2"}, args...)...)
	}
	got := step(exitOK, "", "lru.wasm")
	for _, line := range []string{
		"  insert slot 0, chunk 5, depth 0, request 1\n  insert slot 1, chunk 6, depth 1 after slot 0, request 1\n  request_end\n  touch slot 0",
		"#1 request 2 at 1s: victim slot 1, chunk 6, depth 1 after slot 0, request 1, 0 uses; 2 resident, 1 hits, 2 misses, 0 evicted; ",
	} {
		if !strings.Contains(got, line) {
			t.Errorf("want %q, got\n%s", line, got)
		}
	}
	if got := step(exitOK, "#1 ", "--only", "evict", "fifo.wasm"); !strings.Contains(got, "victim slot 0") || strings.Contains(got, "insert") {
		t.Errorf("fifo, only evict: want slot 0 and no events, got\n%s", got)
	}
	a := wasmtest.Assembly{Pages: 200}.Importing(abi.ImportModule, abi.ImportLog, "iii>").With(abi.ExportMarker, ">").
		With(abi.ExportBuffer, "ii>i", []byte{0x20, 0}, wasmtest.I32(21), []byte{0x74}, wasmtest.I32(4096), []byte{0x6a}).With(abi.ExportInit, "i>i", wasmtest.I32(0)).
		With(abi.ExportEvents, "ii>i", wasmtest.I32(0)).
		With(abi.ExportStep, "ii>I", wasmtest.I32(2), wasmtest.I32(4096), wasmtest.I32(3), wasmtest.Call(0), wasmtest.Packed(abi.StatusDefault, 0))
	testenv.OK(t, os.WriteFile(filepath.Join(dir, "a.wasm"), a.Bytes(), 0o600))
	if got := step(exitOK, "names none", "a.wasm"); !strings.Contains(got, "  log: WARN: ") {
		t.Errorf("a module that logs: want the line, got\n%s", got)
	}
	both := a.With(abi.ExportLayout, "ii>I", wasmtest.Packed(abi.StatusDefault, 0)).Bytes()
	testenv.OK(t, os.WriteFile(filepath.Join(dir, "both.wasm"), both, 0o600))
	step(exitOK, "names none", "both.wasm")
	step(exitOK, "#1 Llama-3.1-8B, 32 x 64 KiB pages: 32 segments", "--only", "layout", "both.wasm")
	a = a.With(abi.ExportStep, "ii>I", wasmtest.Packed(abi.StatusInternal, 0))
	testenv.OK(t, os.WriteFile(filepath.Join(dir, "b.wasm"), a.Bytes(), 0o600))
	step(exitPolicy, "", "b.wasm")
	step(exitOK, `"admitted":true`, "--level", "0=1,1=2", "--cost", "0=2,1=1", "--until", "1", "--json", "reuse.wasm")
	step(exitPolicy, "does not evict or layout; with --level", "fanout.wasm")
	step(exitOK, "to the emptiest, path t_", "--level", "0=1,1=2", "--cost", "0=2,1=1", "--until", "1", "--only", "place,layout", "llmd.wasm")
	step(exitUsage, "want events, evict, admit, place, layout or log", "--only", "all", "lru.wasm")
	step(exitUsage, "want a share", "--capacity", "0%", "lru.wasm")
	if got := step(exitOK, "", "--profile", "--only", "log", "lru.wasm"); !strings.Contains(got, "\nkv_step: ") ||
		!strings.Contains(got, "slotlist.__List_.Victims\n") {
		t.Errorf("a profile: want kv_step and its functions, got\n%s", got)
	}
	cmd := command(t, dir, "policy", "step", "--trace", simTrace(t), "--capacity", "9", "--only", "evict", "lru.wasm")
	m := onTerminal(t, cmd)
	for _, keys := range []struct{ wait, press string }{{"#1 ", "\n"}, {"#2 ", "2\n"}, {"#4 ", "q\n"}} {
		m.await(t, keys.wait, func(drawn string) bool { return strings.Contains(drawn, keys.wait) })
		_, err := m.screen.WriteString(keys.press)
		testenv.OK(t, err)
	}
	<-m.ended
	if err := cmd.Wait(); err != nil || strings.Contains(m.text(), "#5 ") {
		t.Errorf("Enter, two more and q: want four decisions and success, got %v and %q", err, m.text())
	}
	trace := []string{"--trace", simTrace(t), "--capacity", "5%", "--json"}
	var rows []struct{ Hits, Evictions int }
	testenv.OK(t, json.Unmarshal([]byte(want(t, dir, exitOK, "", append([]string{"sim", "--policy", "lru.wasm"}, trace...)...)), &rows))
	lines := strings.Split(strings.TrimSpace(want(t, dir, exitOK, "", append([]string{"policy", "step", "--from", strconv.Itoa(rows[0].Evictions), "lru.wasm"}, trace...)...)), "\n")
	var last stepCall
	testenv.OK(t, json.Unmarshal([]byte(lines[len(lines)-1]), &last))
	if last.Hits != rows[0].Hits || last.Evicted != rows[0].Evictions || last.Decision != uint64(rows[0].Evictions) {
		t.Errorf("at the end: want what the simulation counts, %+v, got %d hits, %d evicted, decision %d", rows[0], last.Hits, last.Evicted, last.Decision)
	}
}

// What the examples' authors see: where a chunk goes and how full the roots were said to be, and how pages are laid out.
func TestPolicyStepOfExamples(t *testing.T) {
	dir := t.TempDir()
	text := `{"timestamp":0,"input_length":9,"hash_ids":[5,6]}` + "\n" + `{"timestamp":2000,"input_length":9,"hash_ids":[5,7]}` + "\n"
	testenv.OK(t, os.WriteFile(filepath.Join(dir, "t.jsonl"), []byte(text), 0o600))
	spill := policytest.Example(t, "spill") + ":room_percent=100"
	got := want(t, dir, exitOK, "", "policy", "step", "--trace", "t.jsonl", "--level", "0=3,1=2", "--cost", "0=5,1=1", spill)
	for _, line := range []string{
		"#2 request 1 at 0s: new, chunk 6, depth 1, request 1: root 0 is 0 % full, root 1 is 0 % full, to root 0, path r0/",
		"#3 request 2 at 2s: new, chunk 7, depth 1, request 2: root 0 is 67 % full, root 1 is 0 % full, to root 1, path r0/",
	} {
		if !strings.Contains(got, line) || strings.Contains(got, "#4 ") {
			t.Errorf("spill: want three decisions and %q, got\n%s", line, got)
		}
	}
	aligned := policytest.Example(t, "aligned")
	got = want(t, dir, exitOK, "", "policy", "step", "--only", "layout", aligned)
	for _, line := range []string{"#2 MLA, 61 x 18,432 B pages: 976 segments; ", "\n  plane 1, blocks from 0: 1, bytes of each page from 0: 18432, gap 0\n", "#3 "} {
		if !strings.Contains(got, line) {
			t.Errorf("aligned: want %q, got\n%s", line, got)
		}
	}
	var call stepCall
	testenv.OK(t, json.Unmarshal([]byte(want(t, dir, exitOK, "", "policy", "step", "--until", "1", "--json", aligned)), &call))
	if n := len(call.Segments); n != 512 || call.Segments[511] != [6]uint32{31, 15, 1, 0, 64 << 10, 0} {
		t.Errorf("aligned, JSON: got %d segments, the last %v; want 512, the last of plane 31 and block 15", n, call.Segments[max(0, n-1):])
	}
}
