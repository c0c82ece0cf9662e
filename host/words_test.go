package host_test

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

// coined are words that this code once used for things that have a standard name. They must not return.
var coined = strings.Fields(`
	fellows doom dooms Condemn drill expelled heir bequeath nameable callVictims callRest callPieces Foreseen Foresee
	foretold foretell mayStillGo lineup reform office offices lent bury reign dormant census impound seize strays strayed
	nameless doWithout gatePatience shutGate meetTheEnd nudge forgone doorMarks affords standin detour takeDetour
	moveAside ErrSpace fileCrew crew comeBack ration liveSpace liveQueue deed deeds
`)

func TestWords(t *testing.T) {
	if _, err := os.Stat("../.git"); err != nil {
		t.Skip("not a checkout: git lists the files that this test reads")
	}
	out, err := exec.Command("git", "-C", "..", "ls-files", "*.go", "*.proto", "*.py", "*.toml", "*.md").Output()
	if err != nil {
		t.Fatalf("git ls-files: %v", err)
	}
	pattern := regexp.MustCompile(`\b(` + strings.Join(coined, "|") + `)\b`)
	for name := range strings.FieldsSeq(string(out)) {
		text, err := os.ReadFile("../" + name)
		if err != nil || name == "host/words_test.go" {
			continue
		}
		for n, line := range strings.Split(string(text), "\n") {
			if word := pattern.FindString(line); word != "" {
				t.Errorf("%s:%d: %q has a standard name: %s", name, n+1, word, strings.TrimSpace(line))
			}
		}
	}
}
