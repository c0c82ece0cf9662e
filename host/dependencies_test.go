package host_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

var (
	goInstall   = regexp.MustCompile(`\bgo (?:-C (\S+) )?(?:install|run) (?:-\S+ )*(\S+)`)
	requirement = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]*==\S+( ; [^\\]+)? \\$`)
	hash        = regexp.MustCompile(`^    --hash=sha256:[0-9a-f]{64}( \\)?$`)
)

// What the build, the tests and continuous integration download is named with its version and its hash: Go modules and tools by
// go.sum, Python packages by lock files. (`make check` compares the Go modules of this machine with go.sum.)
func TestDependenciesArePinned(t *testing.T) {
	testenv.Need(t, testenv.Git)
	list, err := exec.Command("git", "-C", "..", "ls-files").Output()
	testenv.OK(t, err)
	locks := 0
	for name := range strings.Lines(string(list)) {
		name = strings.TrimSpace(name)
		read := func() string {
			text, err := os.ReadFile(filepath.Join("..", name))
			testenv.OK(t, err)
			return string(text)
		}
		switch base := filepath.Base(name); {
		case base == "engines.txt", base == "requirements.txt":
			locks++
			pythonLock(t, name, read())
		case base == "Makefile", filepath.Ext(base) == ".sh", filepath.Ext(base) == ".mk", strings.HasPrefix(name, ".ci/"):
			downloads(t, name, read())
		}
	}
	if locks < 2 {
		t.Errorf("%d lock files, want two of Python", locks)
	}
}

// downloads looks at the commands of a script that install something.
func downloads(t *testing.T, name, text string) {
	for line := range strings.Lines(text) {
		line = strings.ReplaceAll(strings.TrimSpace(line), "$(GO)", "go")
		if m := goInstall.FindStringSubmatch(line); m != nil && !strings.HasPrefix(m[2], ".") && !strings.HasSuffix(m[1], ".ci/tools") {
			t.Errorf("%s: no hash of it is in .ci/tools/go.sum: %s", name, line)
		}
		if strings.Contains(line, "pip install") && !strings.Contains(line, "--require-hashes") && !strings.Contains(line, "--no-deps") {
			t.Errorf("%s: packages without hashes: %s", name, line)
		}
	}
}

func pythonLock(t *testing.T, name, text string) {
	hashes := 1 // of the last package
	lines := strings.Split(strings.TrimSpace(text), "\n")
	for n, line := range append(lines, "") {
		switch {
		case hash.MatchString(line):
			hashes++
		case strings.HasPrefix(line, "#"):
		case hashes == 0:
			t.Errorf("%s:%d: the package above has no hash", name, n+1)
			return
		case requirement.MatchString(line):
			hashes = 0
		case line != "":
			t.Errorf("%s:%d: neither a version nor a hash: %s", name, n+1, line)
		}
	}
}
