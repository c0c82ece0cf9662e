package host_test

import (
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

var (
	namedTest = regexp.MustCompile("`(Test[A-Z][A-Za-z0-9]*)`")
	testFunc  = regexp.MustCompile(`(?m)^func (Test[A-Z][A-Za-z0-9]*)\(`)
)

// The tests that promises and claims name exist, and each row of the table of what tenants can do to each other has one.
func TestClaimsHaveTests(t *testing.T) {
	testenv.Need(t, testenv.Git)
	list, err := exec.Command("git", "-C", "..", "ls-files", "*_test.go").Output()
	testenv.OK(t, err)
	have := map[string]bool{}
	for name := range strings.Lines(string(list)) {
		for _, m := range testFunc.FindAllStringSubmatch(readText(t, "../"+strings.TrimSpace(name)), -1) {
			have[m[1]] = true
		}
	}
	for _, file := range []string{"../README.md", "../.github/SECURITY.md", "docs/design.md", "docs/operate.md", "docs/formats.md", "../.github/CONTRIBUTING.md"} {
		for _, m := range namedTest.FindAllStringSubmatch(readText(t, file), -1) {
			if !have[m[1]] {
				t.Errorf("%s names %s, which is no test", file, m[1])
			}
		}
	}
	table := false // one whose last column has tests
	for line := range strings.Lines(readText(t, "../.github/SECURITY.md")) {
		switch line = strings.TrimSpace(line); {
		case !strings.HasPrefix(line, "|"):
			table = false
		case strings.HasSuffix(line, "| test |"):
			table = true
		case table && !strings.HasPrefix(line, "|---") && !strings.HasPrefix(line, "| operator:") && !namedTest.MatchString(line):
			t.Errorf("a row names no test: %s", line)
		}
	}
}

var (
	testCommand   = regexp.MustCompile("(?:\\bgo|\\$\\(GO\\)) test [^`\n]*")
	namedPackage  = regexp.MustCompile(` (\./\S*)`)
	namedInOption = regexp.MustCompile(` -run '?\^?(Test[A-Za-z0-9]+)`)
)

// A command of the Makefile or a document that runs one test names a package that has it: go test takes none for success.
func TestCommandsNameTheirTests(t *testing.T) {
	commands := 0
	for _, path := range append(documents(t), "../Makefile") {
		for _, command := range testCommand.FindAllString(readText(t, path), -1) {
			in, test := namedPackage.FindStringSubmatch(command), namedInOption.FindStringSubmatch(command)
			if in == nil || test == nil {
				continue
			}
			commands++
			files, err := filepath.Glob("../" + in[1] + "/*_test.go")
			testenv.OK(t, err)
			if !slices.ContainsFunc(files, func(file string) bool {
				return strings.Contains(readText(t, file), "\nfunc "+test[1])
			}) {
				t.Errorf("%s: no test %s is in %s: %s", path, test[1], in[1], command)
			}
		}
	}
	if commands < 8 {
		t.Errorf("only %d commands were found", commands)
	}
}
