package faultfs

import (
	"errors"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/staging"
)

func TestParseRules(t *testing.T) {
	for _, c := range []struct {
		text string
		want Rule
		back string // how the rule says itself, if not as it was written
	}{
		{text: "write /root/** 3rd: eio", want: Rule{Op: staging.OpWrite, Path: "/root/**", When: When{First: 3, Last: 3}, Fault: Fault{Errno: unix.EIO}}},
		{text: "any **: enospc", want: Rule{Op: staging.OpAny, Path: "**", Fault: Fault{Errno: unix.ENOSPC}}},
		{text: "write,read *.tmp every 4th: short", back: "read,write *.tmp every 4th: short",
			want: Rule{Op: staging.OpRead | staging.OpWrite, Path: "*.tmp", When: When{Every: 4}, Fault: Fault{Short: true, Bytes: -1}}},
		{text: "write a 2nd-11th every 2nd: torn 4097", want: Rule{Op: staging.OpWrite, Path: "a",
			When: When{First: 2, Last: 11, Every: 2}, Fault: Fault{Torn: true, Bytes: 4097}}},
		{text: "sync a 12th-: eio after", want: Rule{Op: staging.OpSync, Path: "a", When: When{First: 12}, Fault: Fault{Errno: unix.EIO, After: true}}},
		{text: "read /a?b/* 12.5% seed 7: delay 20ms eintr", want: Rule{Op: staging.OpRead, Path: "/a?b/*",
			When: When{Percent: 12.5, Seed: 7}, Fault: Fault{Delay: 20 * time.Millisecond, Errno: unix.EINTR}}},
		{text: "read x:y : hang estale", back: "read x:y: hang estale",
			want: Rule{Op: staging.OpRead, Path: "x:y", Fault: Fault{Hang: true, Errno: unix.ESTALE}}},
		{text: "publish a: 21st: eexist # why", back: "publish a: 21st: eexist",
			want: Rule{Op: staging.OpPublish, Path: "a:", When: When{First: 21, Last: 21}, Fault: Fault{Errno: unix.EEXIST}}},
		{text: "lock a: hang", want: Rule{Op: staging.OpLock, Path: "a", Fault: Fault{Hang: true}}},
		{text: "read a: torn 0", want: Rule{Op: staging.OpRead, Path: "a", Fault: Fault{Torn: true}}},
	} {
		rules, err := ParseRules("\n# nothing\n" + c.text + "\n")
		if err != nil || len(rules) != 1 || rules[0] != c.want {
			t.Errorf("%q: %+v %v, want %+v", c.text, rules, err, c.want)
			continue
		}
		if c.back == "" {
			c.back = c.text
		}
		if got := rules[0].String(); got != c.back {
			t.Errorf("%q says itself as %q", c.text, got)
		}
	}
}

func TestParseRulesErrors(t *testing.T) {
	for text, want := range map[string]string{
		"write":                           "want OPS PATH",
		"write a b c":                     "no ':'",
		"wrote a: eio":                    `unknown operation "wrote"`,
		"write, a: eio":                   `unknown operation ""`,
		"write : eio":                     "no path",
		"write a:  ":                      "want OPS",
		"write a 1st:":                    "no fault",
		"write a 3th: eio":                `"3th"`,
		"write a 11st: eio":               `"11st"`,
		"write a 0th: eio":                `"0th"`,
		"write a 03rd: eio":               `"03rd"`,
		"write a 5th-4th: eio":            "before it begins",
		"write a 5th 6th: eio":            `unexpected "6th"`,
		"write a every: eio":              `""`,
		"write a every 2nd every: eio":    `"every"`,
		"write a 0%: eio":                 "above 0%",
		"write a NaN%: eio":               "above 0%",
		"write a 101%: eio":               "at most 100%",
		"write a x%: eio":                 "x",
		"write a seed 3: eio":             `"seed"`,
		"write a 5% seed x: eio":          "x",
		"write a: efoo":                   `unknown fault "efoo"`,
		"write a: eio before":             `unexpected "before"`,
		"write a: delay eio":              "delay wants",
		"write a: delay -1s":              "delay wants",
		"write a: torn -1":                "number of bytes",
		"write a: torn 1 2":               `unexpected "2"`,
		"sync a: torn 1":                  "only a read or a write",
		"any a: short":                    "only a read or a write",
		"read a: hang\nread a: hangs":     "line 2",
		"read a: hang hang":               `unknown fault "hang"`,
		"read a 99999999999999999999th:x": "no ':'",
	} {
		rules, err := ParseRules(text)
		if !errors.Is(err, ErrRule) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v %v, want %q in it", text, rules, err, want)
		}
	}
	defer func() {
		if recover() == nil {
			t.Error("MustRules took nonsense")
		}
	}()
	MustRules("nonsense")
}

func FuzzParseRules(f *testing.F) {
	f.Add("write /root/** 3rd: eio")
	f.Add("read,sync a 2nd-11th every 2nd: delay 20ms eio after\n# x\nany ** 12.5% seed 7: hang")
	f.Add("read a:: torn 9")
	f.Fuzz(func(t *testing.T, text string) {
		rules, err := ParseRules(text)
		if err != nil {
			if rules != nil || !errors.Is(err, ErrRule) {
				t.Fatalf("%v beside %v", rules, err)
			}
			return
		}
		for _, r := range rules {
			again, err := ParseRules(r.String())
			if err != nil || len(again) != 1 || again[0] != r {
				t.Fatalf("%+v says itself as %q, read as %+v %v", r, r.String(), again, err)
			}
		}
	})
}

func TestMatches(t *testing.T) {
	for _, c := range []struct {
		glob, name string
		want       bool
	}{
		{"/a/b", "/a/b", true}, {"/a/b", "/a/bc", false}, {"/a/b", "/a", false},
		{"*", "/x/y/z", true}, {"*.tmp", "/x/y.tmp", true}, {"*.tmp", "/x.tmp/y", false}, {"b", "/a/b", true},
		{"/a/*", "/a/b", true}, {"/a/*", "/a/b/c", false}, {"/a/*/c", "/a/b/c", true}, {"/*/*", "/a/b", true},
		{"/a/?", "/a/b", true}, {"/a?b", "/a/b", false}, {"/a/?", "/a/", false},
		{"/a/**", "/a/b/c", true}, {"/a/**", "/a/", true}, {"/a/**", "/a", false}, {"**", "", true}, {"**", "/a/b", true},
		{"/**/c", "/a/b/c", true}, {"/**/c", "/c", false}, {"/**/c", "/a/c/c", true}, {"/**/b*/c", "/a/b/bx/c", true},
		{"/a*b*c/d", "/aXbYbZc/d", true}, {"/a*/**x/*.k", "/ab/c/dx/e.k", true}, {"/a*/**x/*.k", "/ab/c/dx/e/f.k", false},
		{"**/*-tmp", "/r/x-tmp", true}, {"/a/***", "/a/b", true}, {"", "", true}, {"", "/a/", true}, {"a/*", "a/", true},
	} {
		if got := matches(c.glob, c.name); got != c.want {
			t.Errorf("%q on %q: %v", c.glob, c.name, got)
		}
	}
}

// FuzzMatches compares with a matcher that is slow and plainly right.
func FuzzMatches(f *testing.F) {
	f.Add("/a*/**x/*.k", "/ab/c/dx/e.k")
	f.Add("**/?*", "a/b")
	f.Fuzz(func(t *testing.T, glob, name string) {
		if len(glob) > 12 || len(name) > 24 || !strings.Contains(glob, "/") {
			return
		}
		if got, want := matches(glob, name), plainMatch(glob, name); got != want {
			t.Fatalf("%q on %q: %v, want %v", glob, name, got, want)
		}
	})
}

func plainMatch(glob, name string) bool {
	switch {
	case glob == "":
		return name == ""
	case strings.HasPrefix(glob, "**"):
		return plainMatch(glob[2:], name) || name != "" && plainMatch(glob, name[1:])
	case glob[0] == '*':
		return plainMatch(glob[1:], name) || name != "" && name[0] != '/' && plainMatch(glob, name[1:])
	case name == "":
		return false
	}
	return (glob[0] == name[0] || glob[0] == '?' && name[0] != '/') && plainMatch(glob[1:], name[1:])
}

func TestWhen(t *testing.T) {
	for _, c := range []struct {
		when string
		want string // of the first 12 calls
	}{
		{"", "xxxxxxxxxxxx"},
		{"3rd", "..x........."},
		{"3rd-5th", "..xxx......."},
		{"10th-", ".........xxx"},
		{"every 4th", "...x...x...x"},
		{"3rd- every 4th", ".....x...x.."},
		{"100%", "xxxxxxxxxxxx"},
		{"50% seed 1", "...xx...x.x."},
	} {
		w := MustRules("read a " + c.when + ": eio")[0].When
		got := make([]byte, 12)
		for i := range got {
			got[i] = '.'
			if w.takes(uint64(i) + 1) {
				got[i] = 'x'
			}
		}
		if string(got) != c.want {
			t.Errorf("%q takes %s, want %s", c.when, got, c.want)
		}
	}
	w, hits := When{Percent: 10, Seed: 42}, 0
	for n := range uint64(100_000) {
		if w.takes(n + 1) {
			hits++
		}
	}
	if hits < 9_700 || hits > 10_300 {
		t.Errorf("10%% took %d of 100000", hits)
	}
}
