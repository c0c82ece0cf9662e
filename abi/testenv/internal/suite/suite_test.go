package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvhost/kvhost/abi/testenv"
)

// checkout makes a module with these test files, each in a package of its own.
func checkout(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	testenv.OK(t, os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module "+module+"\n\ngo 1.26\n"), 0o600))
	for name, body := range files {
		testenv.OK(t, os.Mkdir(filepath.Join(dir, name), 0o700))
		text := "package " + name + "\n\nimport \"testing\"\n\n" + body + "\n"
		testenv.OK(t, os.WriteFile(filepath.Join(dir, name, name+"_test.go"), []byte(text), 0o600))
	}
	return dir
}

// run runs one group over all packages of a checkout.
func run(t *testing.T, dir string, timeout time.Duration, g goTest) (code int, said string) {
	t.Helper()
	var out bytes.Buffer
	s := &suite{dir: dir, out: &out, timeout: timeout}
	r := newResult("some")
	s.results = append(s.results, r)
	s.goTest(t.Context(), r, g, func(string) bool { return true })
	code = s.report()
	return code, out.String()
}

// What goes wrong in one package turns the table red, keeps no other from running, and is repeated by the command that is told.
func TestFailuresAreTold(t *testing.T) {
	for name, c := range map[string]struct {
		body, again string
		timeout     time.Duration
		race        bool
	}{
		"fails":  {body: `func TestBad(t *testing.T) { t.Run("part", func(t *testing.T) { t.Error("want 1, got 2") }) }`, again: "-run '^TestBad$/^part$' ./fails"},
		"panics": {body: `func TestBad(t *testing.T) { go panic("broken"); select {} }`, again: "-run '^TestBad$' ./panics"},
		"leaves": {body: "import \"os\"\n\nfunc TestMain(m *testing.M) { os.Exit(3) }", again: "go test -trimpath -tags grpcnotrace ./leaves"},
		"breaks": {body: `func TestBad(t *testing.T) { return 1 }`, again: "go test -trimpath -tags grpcnotrace ./breaks"},
		"hangs":  {body: "func TestWaits(t *testing.T) { t.Parallel() }\n\nfunc TestBad(t *testing.T) { select {} }", again: "-run '^TestBad$' ./hangs", timeout: 2 * time.Second},
		"races": {body: "func TestBad(t *testing.T) {\n\tn, done := 0, make(chan int)\n\tgo func() { n++; close(done) }()\n\tn++\n\t<-done\n}",
			again: "CGO_ENABLED=1 go test -trimpath -race -tags grpcnotrace -count=1 -run '^TestBad$' ./races", race: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if c.race {
				testenv.Need(t, testenv.CC)
			}
			if c.timeout == 0 {
				c.timeout = 30 * time.Minute
			}
			dir := checkout(t, map[string]string{name: c.body, "well": "func TestGood(t *testing.T) {}\n\nfunc TestLess(t *testing.T) { t.Skip(\"missing: luck\") }"})
			code, said := run(t, dir, c.timeout, goTest{race: c.race})
			for _, want := range []string{c.again + "\n", "\n1 passed, 1 failed, 1 skipped\n", "    1  missing: luck\n"} {
				if code != 1 || !strings.Contains(said, want) {
					t.Errorf("a package that %s: exit status %d, want 1 and %q in\n%s", name, code, want, said)
				}
			}
		})
	}
	t.Run("nothing", func(t *testing.T) {
		code, said := run(t, checkout(t, map[string]string{"well": "func TestGood(t *testing.T) {}"}), time.Minute, goTest{})
		if code != 0 || !strings.HasSuffix(said, "\n1 passed, 0 failed, 0 skipped\n") {
			t.Errorf("a package that passes: exit status %d, want 0 and one test that passed in\n%s", code, said)
		}
	})
}

// A slow test is found where it says so at its head, and nowhere else. Those of this checkout have names of their own.
func TestSlowTestsAreFound(t *testing.T) {
	if root := testenv.Root(); root != "" {
		_, err := slowTests(root)
		testenv.NoError(t, err)
	}
	const head = "func TestLong(t *testing.T) {\n\ttestenv.Slow(t)\n}"
	for name, c := range map[string]struct {
		files map[string]string
		want  string // of the error; empty: none
	}{
		"at the head":     {map[string]string{"a": head, "b": "func TestShort(t *testing.T) {}"}, ""},
		"later":           {map[string]string{"a": "func TestLong(t *testing.T) {\n\tt.Parallel()\n\ttestenv.Slow(t)\n}"}, "no test's first statement"},
		"in a part":       {map[string]string{"a": "func part(t *testing.T) {\n\ttestenv.Slow(t)\n}"}, "no test's first statement"},
		"of another name": {map[string]string{"a": head, "b": head + "\n\nfunc TestOther(t *testing.T) {}"}, ""},
	} {
		found, err := slowTests(checkout(t, c.files))
		if c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("testenv.Slow %s: %v, want an error with %q", name, err, c.want)
		}
		if c.want == "" && (err != nil || found.pattern() != "^(TestLong)$" || !found.packages["a"]) {
			t.Errorf("testenv.Slow %s: %v and %v, want TestLong of package a", name, found, err)
		}
	}
	dir := checkout(t, map[string]string{"a": head + "\n\nfunc TestOther(t *testing.T) {\n\ttestenv.Slow(t)\n}", "b": head + "\n"})
	testenv.OK(t, os.WriteFile(filepath.Join(dir, "b", "more_test.go"), []byte("package b\n\nfunc TestOther(t *testing.T) {}\n"), 0o600))
	if _, err := slowTests(dir); err == nil || !strings.Contains(err.Error(), "TestOther is slow, and in b it is not") {
		t.Errorf("a name that is slow in one package and not in another: %v, want an error", err)
	}
	if found, err := slowTests(testenv.Root()); err != nil || len(found.names) == 0 {
		t.Errorf("the slow tests of the checkout: %v, %v, want some", found.names, err)
	}
}

// A cell that has none of the packages that were asked for is skipped.
func TestACellWithoutPackages(t *testing.T) {
	t.Setenv("PACKAGE", "host/internal/none")
	r := newResult("none")
	s := &suite{dir: testenv.Root()}
	for _, c := range cells() {
		testenv.OK(t, s.cell(t.Context(), r, c))
	}
	if got := len(r.reasons["PACKAGE names none of its packages"]); got != len(cells()) {
		t.Errorf("%d cells are skipped for the lack of packages, want all %d: %v", got, len(cells()), r.reasons)
	}
}

// Each package with tests is in one group, and each group has some.
func TestGroupsAreWhole(t *testing.T) {
	list, err := (&suite{dir: testenv.Root()}).packages(t.Context(), func(string) bool { return true })
	testenv.OK(t, err)
	have := map[string]bool{}
	for _, path := range list {
		n := 0
		for name, has := range map[string]func(string) bool{"processes": in(processes), "single": in(single), "race": concurrent} {
			if has(path) {
				n++
				have[name] = true
			}
		}
		if n != 1 {
			t.Errorf("%s is in %d groups, want 1", path, n)
		}
	}
	if len(have) != 3 {
		t.Errorf("groups with packages: %v, want 3", have)
	}
}
