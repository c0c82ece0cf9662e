package command

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/gds/gdstest"
)

// bench prints its table for host memory, and leaves nothing behind. Figures are not compared.
func TestBench(t *testing.T) {
	dir := shortDir(t)
	r := finish(t, command(t, dir, "bench", "--root", dir, "--memory", "host", "--chunks", "1", "--rounds", "1", "--pages", "mla",
		"--engine-threads-per-gpu", "2"))
	if r.code != 0 || strings.Count(r.stdout, "| staged |") != 8 ||
		strings.Count(r.stdout, "the first layer of all chunks") != 2 {
		t.Errorf("bench: exit code %d, want 8 staged rows and 2 lines about layers\n%s%s", r.code, r.stdout, r.stderr)
	}
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	for _, wrong := range [][]string{{"--memory", "x"}, {"--pages", "x"},
		{"--dtype", "x"}, {"--compression", "off,x"}} {
		if r := finish(t, command(t, dir, append([]string{"bench", "--root", dir}, wrong...)...)); r.code != exitUsage {
			t.Errorf("bench %v: exit code %d, want wrong usage\n%s", wrong, r.code, r.stderr)
		}
	}
}

// A client's session stores and loads through a host in a process of its own: in files and in memory, from
// host memory and from a GPU's. Every byte is compared, and the host leaves nothing behind.
func TestBenchThroughClient(t *testing.T) {
	dir, double := shortDir(t), gdstest.Build(t)
	for memory, pages := range map[string]string{"host": "heads", "gpu": "tokens"} { // of pages that sizes share every token is compared, too
		cmd := command(t, dir, "bench", "--root", dir, "--root", "memory:", "--memory", memory,
			"--chunks", "1", "--rounds", "1", "--pages", pages, "--json", "--engine-direct-io=false",
			"--gds-max-device-memory", "0", "--engine-threads-per-gpu", "2")
		cmd.Env = append(cmd.Env, "TMPDIR="+dir, "KVHOST_SOCKET=/nowhere")
		if memory == "gpu" {
			cmd.Env = append(cmd.Env, "LD_LIBRARY_PATH="+filepath.Dir(double.Path))
		}
		r := finish(t, cmd)
		var rows []struct {
			Pass, Route string
			Ours, CPU   float64
		}
		if err := json.Unmarshal([]byte(r.stdout), &rows); err != nil || r.code != 0 || len(rows) != 8 {
			t.Fatalf("bench of two roots: exit code %d, %v, want 8 rows\n%s%s", r.code, err, r.stdout, r.stderr)
		}
		for i, row := range rows {
			if want := []string{"staged", "memory"}[i/4]; row.Route != want || row.Ours <= 0 ||
				row.CPU <= 0 {
				t.Errorf("%s: want route %s: %+v", memory, want, row)
			}
		}
		if left, _ := os.ReadDir(dir); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	}
}

// Several clients go through one host at once, in host memory and with a GPU each: a row says how many, and what they stored together takes
// as much in the root as each one's chunks. A machine with fewer GPUs is not measured in host memory instead.
func TestBenchClients(t *testing.T) {
	dir, double := shortDir(t), gdstest.Build(t)
	run := func(memory, clients, gpus string) result {
		cmd := command(t, dir, "bench", "--root", dir, "--root", "memory:", "--memory", memory, "--clients", clients, "--chunks", "1",
			"--rounds", "1", "--pages", "fp8", "--json", "--engine-direct-io=false", "--gds-max-device-memory", "0",
			"--engine-threads-per-gpu", "2")
		if cmd.Env = append(cmd.Env, "TMPDIR="+dir); gpus != "" {
			cmd.Env = append(cmd.Env, "LD_LIBRARY_PATH="+filepath.Dir(double.Path), "KVHOST_DOUBLE=cuDeviceGetCount:answer="+gpus)
		}
		return finish(t, cmd)
	}
	for _, gpus := range []string{"", "2"} {
		r := run(map[string]string{"": "host", "2": "gpu"}[gpus], "1,2", gpus)
		var rows []struct {
			Clients            int
			Ours, Copy, Stored float64
		}
		if err := json.Unmarshal([]byte(r.stdout), &rows); err != nil || r.code != 0 || len(rows) != 16 {
			t.Fatalf("%q: exit code %d, %v, want 16 rows\n%s%s", gpus, r.code, err, r.stdout, r.stderr)
		}
		for i, row := range rows {
			if want := 1 + i/4%2; row.Clients != want || row.Ours <= 0 || row.Copy <= 0 || row.Stored < 0.9 || row.Stored > 1 {
				t.Errorf("%q: row %d: want %d clients: %+v", gpus, i, want, row)
			}
		}
	}
	if r := run("auto", "3", "2"); r.code == 0 || !strings.Contains(r.stderr, "too few GPUs: 2 of 3") {
		t.Errorf("3 clients of 2 GPUs: exit code %d, want too few GPUs\n%s", r.code, r.stderr)
	}
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// With --compression each setting has a host of its own, and what is compressed takes less room in the root.
func TestBenchCompression(t *testing.T) {
	dir := shortDir(t)
	cmd := command(t, dir, "bench", "--root", dir, "--memory", "host", "--chunks", "1",
		"--rounds", "1", "--pages", "mla", "--dtype", "fp8", "--compression", "off,huffman,auto", "--json",
		"--engine-direct-io=false", "--engine-threads-per-gpu", "2")
	cmd.Env = append(cmd.Env, "TMPDIR="+dir)
	r := finish(t, cmd)
	var rows []struct {
		Compression string
		Stored      float64
	}
	if err := json.Unmarshal([]byte(r.stdout), &rows); err != nil || r.code != 0 || len(rows) != 12 {
		t.Fatalf("bench of three settings: exit code %d, %v, want 12 rows\n%s%s", r.code, err, r.stdout, r.stderr)
	}
	for i, row := range rows {
		want := []string{"off", "huffman", "auto"}[i/4]
		if row.Compression != want || want == "off" && (row.Stored < 0.9 || row.Stored > 1) ||
			want == "huffman" && (row.Stored < 1.15 || row.Stored > 1.3) {
			t.Errorf("row %d: want %s: %+v", i, want, row)
		}
	}
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// The direct route is measured through a client where cuFile takes it, and named by cuFile's statistics. Where the host stages
// the root, it is left out with the reason, and no staged figure stands in its place.
func TestBenchThroughClientDirect(t *testing.T) {
	testenv.Need(t, testenv.DirectIO)
	dir, double := shortDir(t), gdstest.Build(t)
	libraries := t.TempDir()
	for _, name := range []string{"libcuda.so.1", "libcufile.so.0"} {
		testenv.OK(t, os.Symlink(double.Path, filepath.Join(libraries, name)))
	}
	for rule, says := range map[string]string{"": "", "cuFileHandleRegister:code=5019": "INVALID_FILE_OPEN_FLAG"} {
		cmd := command(t, dir, "bench", "--root", dir, "--chunks", "1", "--rounds", "1", "--pages", "fp8",
			"--json", "--engine-threads-per-gpu", "2")
		cmd.Env = append(cmd.Env, "LD_LIBRARY_PATH="+libraries, "KVHOST_DOUBLE="+rule)
		r := finish(t, cmd)
		var rows []struct{ Route string }
		if err := json.Unmarshal([]byte(r.stdout), &rows); err != nil || r.code != 0 {
			t.Fatalf("bench of the direct route: exit code %d, %v\n%s%s", r.code, err, r.stdout, r.stderr)
		}
		direct := 0
		for _, row := range rows {
			if strings.HasPrefix(row.Route, "direct: cuFile") {
				direct++
			}
		}
		if want := map[bool]int{true: 3}[rule == ""]; direct != want || len(rows) != 8+want || !strings.Contains(r.stderr, says) {
			t.Errorf("%q: %d of %d rows are direct, want %d\n%s", rule, direct, len(rows), want, r.stderr)
		}
	}
}
