package faultfs

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvhost/kvhost/staging"
)

// errnoNames are the errnos that a rule can name.
var errnoNames = []struct {
	name  string
	errno unix.Errno
}{
	{"eio", unix.EIO}, {"enospc", unix.ENOSPC}, {"edquot", unix.EDQUOT}, {"eintr", unix.EINTR}, {"estale", unix.ESTALE},
	{"enoent", unix.ENOENT}, {"eexist", unix.EEXIST}, {"eacces", unix.EACCES}, {"eperm", unix.EPERM},
	{"erofs", unix.EROFS}, {"einval", unix.EINVAL}, {"exdev", unix.EXDEV}, {"emfile", unix.EMFILE},
	{"enodev", unix.ENODEV}, {"enotconn", unix.ENOTCONN}, {"etimedout", unix.ETIMEDOUT}, {"eagain", unix.EAGAIN},
	{"ebusy", unix.EBUSY}, {"efbig", unix.EFBIG}, {"emlink", unix.EMLINK}, {"enomem", unix.ENOMEM},
	{"enosys", unix.ENOSYS}, {"eopnotsupp", unix.EOPNOTSUPP}, {"enolck", unix.ENOLCK}, {"eloop", unix.ELOOP},
}

// opsByName maps the word of each operation to the operation.
var opsByName = func() map[string]staging.Op {
	ops := map[string]staging.Op{}
	for op := staging.Op(1); op <= staging.OpLock; op <<= 1 {
		ops[op.String()] = op
	}
	return ops
}()

// ParseRules parses rules, one per line. Empty lines are skipped, and so is text after a '#' at the start of a word.
// A rule is
//
//	OPS PATH [WHEN...]: FAULT
//
// OPS are words of [staging.Op] joined by commas, or "any". PATH is [Rule]'s glob, without white space. WHEN is any of
//
//	3rd          the third matching call (also 1st, 2nd, 4th)
//	3rd-5th      the third to the fifth
//	3rd-         the third and all later ones
//	every 4th    each fourth
//	10% seed 7   one in ten, at random; the seed defaults to 0
//
// FAULT is a wait, a failure, or both in this order. A wait is "delay 20ms" or "hang". A failure is an errno ("eio";
// "eio after" makes the call and reports it as failed), "short [BYTES]", "torn [BYTES]" or "power".
func ParseRules(text string) ([]Rule, error) {
	var rules []Rule
	n := 0
	for line := range strings.Lines(text) {
		n++
		words := strings.Fields(line)
		for i, w := range words {
			if w[0] == '#' {
				words = words[:i]
				break
			}
		}
		if len(words) == 0 {
			continue
		}
		r, err := parseRule(words)
		if err != nil {
			return nil, fmt.Errorf("%w: line %d: %w", ErrRule, n, err)
		}
		rules = append(rules, r)
	}
	return rules, nil
}

// MustRules is [ParseRules] for constant text. It panics on an error.
func MustRules(text string) []Rule {
	rules, err := ParseRules(text)
	if err != nil {
		panic(err)
	}
	return rules
}

func parseRule(words []string) (Rule, error) {
	if len(words) < 3 {
		return Rule{}, fmt.Errorf("want OPS PATH [WHEN]: FAULT, got %q", strings.Join(words, " "))
	}
	var r Rule
	var err error
	if r.Op, err = parseOps(words[0]); err != nil {
		return Rule{}, err
	}
	head := words[1:]
	colon := len(head) - 1
	for colon >= 0 && !strings.HasSuffix(head[colon], ":") {
		colon-- // from the end: a path may have colons, a fault has none
	}
	if colon < 0 {
		return Rule{}, fmt.Errorf("no ':' before the fault")
	}
	if r.Fault, err = parseFault(head[colon+1:]); err != nil {
		return Rule{}, err
	}
	if (r.Fault.Short || r.Fault.Torn) && r.Op&^(staging.OpRead|staging.OpWrite) != 0 {
		return Rule{}, fmt.Errorf("only a read or a write can be short or torn, not %q", words[0])
	}
	head = slices.Clone(head[:colon+1])
	head[colon] = strings.TrimSuffix(head[colon], ":")
	if head[colon] == "" {
		head = head[:colon]
	}
	if len(head) == 0 {
		return Rule{}, fmt.Errorf("no path")
	}
	r.Path = head[0]
	if r.When, err = parseWhen(head[1:]); err != nil {
		return Rule{}, err
	}
	return r, nil
}

func parseOps(word string) (staging.Op, error) {
	if word == "any" {
		return staging.OpAny, nil
	}
	var ops staging.Op
	for name := range strings.SplitSeq(word, ",") {
		op, known := opsByName[name]
		if !known {
			return 0, fmt.Errorf("unknown operation %q (any, %s)", name, strings.Join(slices.Sorted(maps.Keys(opsByName)), ", "))
		}
		ops |= op
	}
	return ops, nil
}

func parseWhen(words []string) (w When, err error) {
	for len(words) > 0 {
		word := words[0]
		words = words[1:]
		argument := func() (a string) {
			if len(words) > 0 {
				a, words = words[0], words[1:]
			}
			return a
		}
		percent, isPercent := strings.CutSuffix(word, "%")
		switch {
		case word == "every" && w.Every == 0:
			w.Every, err = parseOrdinal(argument())
		case word == "seed" && w.Percent != 0 && w.Seed == 0:
			w.Seed, err = strconv.ParseUint(argument(), 10, 64)
		case isPercent && w.Percent == 0:
			w.Percent, err = strconv.ParseFloat(percent, 64)
			if err == nil && !(w.Percent > 0 && w.Percent <= 100) {
				err = fmt.Errorf("%q is not above 0%% and at most 100%%", word)
			}
		case w.First == 0:
			w.First, w.Last, err = parseRange(word)
		default:
			err = fmt.Errorf("unexpected %q", word)
		}
		if err != nil {
			return When{}, err
		}
	}
	return w, nil
}

func parseRange(word string) (first, last uint64, err error) {
	from, to, isRange := strings.Cut(word, "-")
	if first, err = parseOrdinal(from); err != nil || isRange && to == "" {
		return first, 0, err
	}
	if last = first; isRange {
		last, err = parseOrdinal(to)
	}
	if err == nil && last < first {
		err = fmt.Errorf("%q ends before it begins", word)
	}
	return first, last, err
}

func parseOrdinal(word string) (uint64, error) {
	n, err := strconv.ParseUint(strings.TrimRight(word, "stndrh"), 10, 64)
	if err != nil || n == 0 || word != ordinal(n) {
		return 0, fmt.Errorf("%q is not a number such as 1st, 2nd or 13th", word)
	}
	return n, nil
}

func parseFault(words []string) (f Fault, err error) {
	next := func() (w string) {
		if len(words) > 0 {
			w, words = words[0], words[1:]
		}
		return w
	}
	word := next()
	switch word {
	case "delay":
		if f.Delay, err = time.ParseDuration(next()); err != nil || f.Delay <= 0 {
			return Fault{}, fmt.Errorf("delay wants a time such as 20ms")
		}
		word = next()
	case "hang":
		f.Hang = true
		word = next()
	case "":
		return Fault{}, fmt.Errorf("no fault after ':'")
	}
	switch word {
	case "":
	case "power":
		f.Power = true
	case "short", "torn":
		f.Short, f.Torn, f.Bytes = word == "short", word == "torn", -1
		if w := next(); w != "" {
			if f.Bytes, err = strconv.ParseInt(w, 10, 64); err != nil || f.Bytes < 0 {
				return Fault{}, fmt.Errorf("%s wants a number of bytes, not %q", word, w)
			}
		}
	default:
		for _, e := range errnoNames {
			if e.name == word {
				f.Errno = e.errno
			}
		}
		if f.Errno == 0 {
			return Fault{}, fmt.Errorf("unknown fault %q", word)
		}
		if len(words) > 0 && words[0] == "after" {
			f.After = true
			next()
		}
	}
	if len(words) > 0 {
		return Fault{}, fmt.Errorf("unexpected %q", words[0])
	}
	return f, nil
}

// String is the rule as [ParseRules] reads it.
func (r Rule) String() string {
	s := r.Op.String() + " " + cmp.Or(r.Path, "**")
	w := r.When
	switch {
	case w.First != 0 && w.First == w.Last:
		s += " " + ordinal(w.First)
	case w.Last != 0:
		s += " " + ordinal(max(1, w.First)) + "-" + ordinal(w.Last)
	case w.First != 0:
		s += " " + ordinal(w.First) + "-"
	}
	if w.Every != 0 {
		s += " every " + ordinal(w.Every)
	}
	if w.Percent != 0 {
		s += " " + strconv.FormatFloat(w.Percent, 'g', -1, 64) + "%"
		if w.Seed != 0 {
			s += " seed " + strconv.FormatUint(w.Seed, 10)
		}
	}
	return s + ": " + r.Fault.String()
}

func (f Fault) String() string {
	var words []string
	if f.Delay > 0 {
		words = append(words, "delay", f.Delay.String())
	} else if f.Hang {
		words = append(words, "hang")
	}
	switch {
	case f.Errno != 0:
		name := f.Errno.Error()
		for _, e := range errnoNames {
			if e.errno == f.Errno {
				name = e.name
			}
		}
		words = append(words, name)
		if f.After {
			words = append(words, "after")
		}
	case f.Short:
		words = append(words, "short")
	case f.Torn:
		words = append(words, "torn")
	case f.Power:
		words = append(words, "power")
	}
	if f.Errno == 0 && (f.Short || f.Torn) && f.Bytes >= 0 {
		words = append(words, strconv.FormatInt(f.Bytes, 10))
	}
	return strings.Join(words, " ")
}

func ordinal(n uint64) string {
	suffix := "th"
	if n/10%10 != 1 {
		switch n % 10 {
		case 1:
			suffix = "st"
		case 2:
			suffix = "nd"
		case 3:
			suffix = "rd"
		}
	}
	return strconv.FormatUint(n, 10) + suffix
}
