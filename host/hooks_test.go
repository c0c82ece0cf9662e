package host_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// The commit-msg hook takes subjects of at most 72 characters, whatever else a message has.
func TestCommitMessageHook(t *testing.T) {
	long := strings.Repeat("x", 72)
	for _, c := range []struct {
		name, message string
		taken         bool
	}{
		{"72 characters", long + "\n\nbody\n", true},
		{"73 characters", long + "x\n", false},
		{"72 characters that are more bytes", strings.Repeat("ä", 72) + "\n", true},
		{"a long line in the body", "store: short\n\n" + long + long + "\n", true},
		{"a long comment and empty lines before the subject", "# " + long + "\n\n\nstore: short\n", true},
		{"a long subject after a comment", "# comment\n" + long + "x\n", false},
		{"no subject", "\n", true},
	} {
		file := filepath.Join(t.TempDir(), "message")
		testenv.OK(t, os.WriteFile(file, []byte(c.message), 0o600))
		out, err := exec.Command("../.github/hooks/commit-msg", file).CombinedOutput()
		if _, failed := err.(*exec.ExitError); err != nil && !failed {
			t.Fatalf("the hook does not run: %v", err)
		}
		if (err == nil) != c.taken {
			t.Errorf("%s: taken %v, want %v; it said %q", c.name, err == nil, c.taken, out)
		}
	}
}
