package config

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// set parses text as the key's kind and stores it in c.
func (k *Key) set(c *Config, text string) error {
	switch p := k.field(c).(type) {
	case *string:
		if k.Kind == Choice && !slices.Contains(k.Choices, text) {
			return k.bad(text, "want one of "+strings.Join(k.Choices, ", ")+Suggest(text, k.Choices))
		}
		*p = text
	case *bool:
		b, err := strconv.ParseBool(text)
		if err != nil {
			return k.bad(text, "want true or false")
		}
		*p = b
	case *float64:
		f, err := strconv.ParseFloat(text, 64)
		if err != nil || !(f >= 0 && f <= 1) {
			return k.bad(text, "want a number from 0 to 1")
		}
		*p = f
	case *time.Duration:
		d, err := time.ParseDuration(text)
		if err != nil {
			return k.bad(text, "want a duration such as 250ms, 30s or 1h30m")
		}
		if err := k.within(text, int64(d)); err != nil {
			return err
		}
		*p = d
	case *int:
		n, err := k.number(text)
		if err != nil {
			return err
		}
		*p = int(n)
	case *int64:
		n, err := k.number(text)
		if err != nil {
			return err
		}
		*p = n
	}
	return nil
}

func (k *Key) number(text string) (int64, error) {
	if k.Auto && text == autoText {
		return Auto, nil
	}
	if k.Kind == Size {
		n, err := ParseSize(text)
		if err != nil {
			return 0, k.bad(text, "want bytes or a size such as 64KiB, 100GiB or 2GB")
		}
		return n, k.within(text, n)
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, k.bad(text, "want a whole number")
	}
	return n, k.within(text, n)
}

func (k *Key) within(text string, n int64) error {
	switch {
	case n < k.Min:
		return k.bad(text, "at least "+k.format(k.Min))
	case k.Max != 0 && n > k.Max:
		return k.bad(text, "at most "+k.format(k.Max))
	}
	return nil
}

func (k *Key) bad(text, want string) error {
	return fmt.Errorf("%w: %s = %q: %s", ErrValue, k.Path(), text, want)
}

func (k *Key) format(n int64) string {
	if k.Auto && n == Auto {
		return autoText
	}
	switch k.Kind {
	case Size:
		return FormatSize(n)
	case Duration:
		return time.Duration(n).String()
	}
	return strconv.FormatInt(n, 10)
}

// text is the key's value in c, as set would take it.
func (k *Key) text(c *Config) string {
	switch p := k.field(c).(type) {
	case *string:
		return *p
	case *bool:
		return strconv.FormatBool(*p)
	case *float64:
		return strconv.FormatFloat(*p, 'g', -1, 64)
	case *time.Duration:
		return p.String()
	case *int:
		return k.format(int64(*p))
	case *int64:
		return k.format(*p)
	}
	return ""
}

// toml is the key's value in c as a TOML value.
func (k *Key) toml(c *Config) string {
	text := k.text(c)
	switch k.Kind {
	case Ratio:
		if !strings.ContainsAny(text, ".e") {
			text += ".0"
		}
		return text
	case Count, Flag:
		return text
	case Size:
		return sizeValue(text)
	}
	return quote(text)
}

var sizeUnits = []struct {
	suffix string
	bytes  int64
}{
	{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40}, {"PiB", 1 << 50},
	{"KB", 1e3}, {"kB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}, {"PB", 1e15}, {"B", 1},
	{"K", 1 << 10}, {"M", 1 << 20}, {"G", 1 << 30}, {"T", 1 << 40}, {"P", 1 << 50},
	{"k", 1 << 10}, {"m", 1 << 20}, {"g", 1 << 30}, {"t", 1 << 40}, {"p", 1 << 50},
}

// ParseSize reads bytes: a whole number, or a number with a unit (KiB or K = 1024, KB = 1000, and so on up to PiB and PB).
func ParseSize(text string) (int64, error) {
	number, unit := strings.TrimSpace(text), int64(1)
	if number == "" {
		return 0, fmt.Errorf("%w: no size: want bytes, or a number with a unit such as 64KiB, 100G or 2TB", ErrValue)
	}
	for _, u := range sizeUnits {
		if rest, ok := strings.CutSuffix(number, u.suffix); ok {
			number, unit = strings.TrimSpace(rest), u.bytes
			break
		}
	}
	if n, err := strconv.ParseInt(number, 10, 64); err == nil {
		if n < 0 || n > math.MaxInt64/unit {
			return 0, fmt.Errorf("%w: size %q is out of range", ErrValue, text)
		}
		return n * unit, nil
	}
	f, err := strconv.ParseFloat(number, 64)
	if err != nil || unit == 1 || strings.ContainsAny(number, "xXpPnN_") {
		return 0, fmt.Errorf("%w: size %q: want bytes, or a number with a unit such as 64KiB, 100G or 2TB", ErrValue,
			text)
	}
	f *= float64(unit)
	if !(f >= 0 && f < math.MaxInt64) {
		return 0, fmt.Errorf("%w: size %q is out of range", ErrValue, text)
	}
	return int64(f), nil
}

// FormatSize writes bytes exactly, with the largest binary unit that divides them.
func FormatSize(n int64) string {
	for i := 4; i >= 0; i-- {
		if u := sizeUnits[i]; n != 0 && n%u.bytes == 0 {
			return strconv.FormatInt(n/u.bytes, 10) + u.suffix
		}
	}
	return strconv.FormatInt(n, 10)
}

// SizeText writes bytes for people: in the largest binary unit, with one digit after the point unless it would be 0.
func SizeText[N int64 | uint64](n N) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	v, i := float64(n)/1024, 0
	for v >= 1024 && i < len(units)-1 {
		v, i = v/1024, i+1
	}
	if v == math.Trunc(v) {
		return fmt.Sprintf("%.0f %ciB", v, units[i])
	}
	return fmt.Sprintf("%.1f %ciB", v, units[i])
}

// DecimalText writes bytes for people in decimal units, as traces and figures have.
func DecimalText(n int64) string {
	const units = "kMGTP"
	v, i := float64(n)/1000, 0
	if v < 1 {
		return fmt.Sprintf("%.0f B", float64(n))
	}
	for v >= 1000 && i < len(units)-1 {
		v, i = v/1000, i+1
	}
	return fmt.Sprintf("%.4g %cB", v, units[i])
}

// quote writes a TOML basic string.
func quote(s string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case r < 0x20 || r == 0x7f:
			fmt.Fprintf(&b, `\u%04X`, r)
		default:
			b.WriteRune(r)
		}
	}
	b.WriteByte('"')
	return b.String()
}
