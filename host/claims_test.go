package host_test

import (
	"os/exec"
	"regexp"
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
	if err != nil {
		t.Fatal(err)
	}
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
