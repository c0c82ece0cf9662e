package faultfs

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/staging"
)

func TestParseRules(t *testing.T) {
	for text, want := range map[string]Rule{
		"write /root/** 3rd: eio": {Op: staging.OpWrite, Path: "/root/**", When: When{Nth: 3}, Fault: Fault{Errno: unix.EIO}},
		"any **: enospc":          {Op: staging.OpAny, Path: "**", Fault: Fault{Errno: unix.ENOSPC}},
		"read,write *.tmp: short": {Op: staging.OpRead | staging.OpWrite, Path: "*.tmp", Fault: Fault{Short: true, Bytes: -1}},
		"write a 2nd: torn 4097":  {Op: staging.OpWrite, Path: "a", When: When{Nth: 2}, Fault: Fault{Torn: true, Bytes: 4097}},
		"write a 5th-: eio":       {Op: staging.OpWrite, Path: "a", When: When{First: 5}, Fault: Fault{Errno: unix.EIO}},
		"sync a: eio after":       {Op: staging.OpSync, Path: "a", Fault: Fault{Errno: unix.EIO, After: true}},
		"read /a?b/* 12.5% seed 7: delay 20ms eintr": {Op: staging.OpRead, Path: "/a?b/*",
			When: When{Percent: 12.5, Seed: 7}, Fault: Fault{Delay: 20 * time.Millisecond, Errno: unix.EINTR}},
		"lock a: hang":   {Op: staging.OpLock, Path: "a", Fault: Fault{Hang: true}},
		"write a: power": {Op: staging.OpWrite, Path: "a", Fault: Fault{Power: true}},
	} {
		if rules, err := ParseRules(text); err != nil || len(rules) != 1 || rules[0] != want {
			t.Errorf("%q is parsed as %+v, error %v, want %+v", text, rules, err, want)
		}
	}
	for _, text := range []string{
		"write", "write a b c", "wrote a: eio", "write, a: eio", "write : eio", "write a:  ", "write a 0th: eio", "write a -: eio",
		"write a 5th 6th: eio", "write a 0%: eio", "write a NaN%: eio", "write a 101%: eio", "write a seed 3: eio",
		"write a 5% seed x: eio", "write a: efoo", "write a: eio before", "write a: delay eio", "write a: torn 1 2",
		"read a: hang\nread a: hangs",
	} {
		if rules, err := ParseRules(text); !errors.Is(err, ErrRule) {
			t.Errorf("%q is parsed as %+v, error %v, want %v", text, rules, err, ErrRule)
		}
	}
}
