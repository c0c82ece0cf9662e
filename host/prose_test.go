package host_test

import (
	"fmt"
	"go/scanner"
	"go/token"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// mannered are words that make a sentence of this code harder to read where they are frequent: its subject is a noun of the
// system, and what happens at the same time, or to another, is said plainly.
var mannered = regexp.MustCompile(`(?i)\b(nobody|somebody|meanwhile|beside|told of|hears? of|whose|stands? in|gives? up)\b`)

// manneredMost is how many of them 100,000 words of comments and documents may have: room for words that are right where they stand.
const manneredMost = 20

// comments returns the text of a Go file's comments.
func comments(src []byte) string {
	var text strings.Builder
	var s scanner.Scanner
	files := token.NewFileSet()
	s.Init(files.AddFile("", files.Base(), len(src)), src, nil, scanner.ScanComments)
	for {
		_, kind, literal := s.Scan()
		switch kind {
		case token.EOF:
			return text.String()
		case token.COMMENT:
			text.WriteString(strings.ReplaceAll(literal, "//", " ") + "\n")
		}
	}
}

// TestProse counts them in the comments of Go that is no test, and in all documents. KVHOST_PROSE=1 lists every one.
func TestProse(t *testing.T) {
	testenv.Need(t, testenv.Git)
	if !exists("../.git") {
		t.Skip("not a checkout: git lists the files that this test reads")
	}
	list, err := exec.Command("git", "-C", "..", "ls-files", "*.go", "*.md").Output()
	if err != nil {
		t.Fatalf("git ls-files: %v", err)
	}
	words, found := map[string]int{}, map[string]int{}
	allWords, all := 0, 0
	for name := range strings.Lines(string(list)) {
		name = strings.TrimSpace(name)
		text, err := os.ReadFile("../" + name)
		if err != nil || strings.HasSuffix(name, "_test.go") || strings.HasSuffix(name, ".pb.go") {
			continue
		}
		prose := string(text)
		if filepath.Ext(name) == ".go" {
			prose = comments(text)
		}
		dir := filepath.Dir(name)
		hits := mannered.FindAllString(prose, -1)
		words[dir] += len(strings.Fields(prose))
		found[dir] += len(hits)
		allWords += len(strings.Fields(prose))
		all += len(hits)
		if len(hits) > 0 && os.Getenv("KVHOST_PROSE") != "" {
			for line := range strings.Lines(prose) {
				if mannered.MatchString(line) {
					fmt.Printf("%s: %s\n", name, strings.TrimSpace(line))
				}
			}
		}
	}
	per := func(found, words int) int { return found * 100_000 / max(words, 1) }
	t.Logf("%d in %d words: %d per 100,000", all, allWords, per(all, allWords))
	if per(all, allWords) <= manneredMost {
		return
	}
	t.Errorf("%d words in 100,000 match %v, want at most %d:", per(all, allWords), mannered, manneredMost)
	for _, dir := range slices.Sorted(maps.Keys(found)) {
		if found[dir] > 0 {
			t.Errorf("  %s: %d in %d words", dir, found[dir], words[dir])
		}
	}
}
