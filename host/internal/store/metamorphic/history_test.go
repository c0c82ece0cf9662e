package metamorphic

import (
	"errors"
	"strings"
	"testing"
)

// TestText: a history's text reads back as the same history.
func TestText(t *testing.T) {
	for seed := range uint64(40) {
		h := Generate(seed, 300)
		again, err := Parse(h.String())
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if again.String() != h.String() {
			t.Errorf("seed %d, kind %s: the history reads back as another one:\n%s", seed, h.Kind.Name, again)
		}
	}
}

// TestBadText: a history that cannot be read says in which line.
func TestBadText(t *testing.T) {
	const head = "kind clean\nseed 1\nhost a none\n"
	for _, text := range []string{
		"",
		"kind unheard-of\n",
		"kind shared\nhost a none\n",
		"kind clean\nhost a\n",
		"kind clean\nhost a forever\n",
		head + "fault write: nonsense\n",
		head + "b.Crash()\n",
		head + "a.Dance()\n",
		head + "a.Crash\n",
		head + "a.Store()\n",
		head + "a.Store(entry=0)\n",
		head + "a.Store(entry=9/1)\n",
		head + "a.Store(entry=0/1, twice=true)\n",
		head + "a.Open(unplug=1)\n",
	} {
		if h, err := Parse(text); !errors.Is(err, ErrSyntax) {
			t.Errorf("%q is read as %v, error %v", text, h, err)
		}
	}
}

// TestRepeats: a history has the same results each time, but for names of directories.
func TestRepeats(t *testing.T) {
	for _, seed := range []uint64{1, 3, 5, 9, 11, 13} {
		h := Generate(seed, 120)
		var texts [2]string
		for i := range texts {
			res, err := runOnce(t, h)
			if err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			texts[i] = withoutDirs(res.Text())
		}
		if texts[0] != texts[1] {
			t.Errorf("seed %d, kind %s: two runs differ:\n%s\nand\n%s", seed, h.Kind.Name, texts[0], texts[1])
		}
	}
}

// withoutDirs removes what differs between the directories of two runs.
func withoutDirs(text string) string {
	words := strings.Split(text, " ")
	for i, w := range words {
		if strings.Contains(w, "kvhost-history") {
			words[i] = "DIR" + w[strings.LastIndexByte(w, '/')+1:]
		}
	}
	return strings.Join(words, " ")
}
