package config

import (
	"cmp"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/BurntSushi/toml"
)

// value is a field that parses its own TOML value.
type value interface {
	set(path string, from any) error
	toml() string
}

// set sets a field to a TOML value, or to the text of a variable or a flag.
func (k *Key) set(field reflect.Value, from any) error {
	if v, reads := field.Addr().Interface().(value); reads {
		return v.set(k.Path(), from)
	}
	switch field.Kind() {
	case reflect.Slice:
		return k.setList(field, from)
	case reflect.Map:
		settings, err := asSettings(k.Path(), from)
		field.Set(reflect.ValueOf(settings))
		return err
	case reflect.Struct:
		return k.setTable(field, from)
	}
	text, err := k.fromTOML(from)
	if err != nil {
		return err
	}
	return k.parse(field, text)
}

func (k *Key) setList(field reflect.Value, from any) error {
	list, ok := from.([]any)
	if !ok {
		return fmt.Errorf("%w: %s is %s, want a list", ErrValue, k.Path(), typeName(from))
	}
	out := reflect.MakeSlice(field.Type(), len(list), len(list))
	for i, v := range list {
		if err := k.set(out.Index(i), v); err != nil {
			return fmt.Errorf("%w (%v)", err, v)
		}
	}
	if len(list) > 0 || field.Type().Elem().Kind() == reflect.Uint32 { // an empty list of users is a rule, too
		field.Set(out)
	}
	return nil
}

func (k *Key) setTable(field reflect.Value, from any) error {
	table, ok := from.(map[string]any)
	if !ok {
		return fmt.Errorf("%w: %s is %s, want a table such as %s", ErrValue, k.Path(), typeName(from), k.toml(field))
	}
	for _, name := range sorted(table) {
		inner := keyNamed(k.inner, name)
		if inner == nil {
			return fmt.Errorf("%w: %s.%s%s", ErrKey, k.Path(), name, Suggest(name, namesOf(k.inner)))
		}
		if err := inner.set(field.FieldByIndex(inner.index), table[name]); err != nil {
			return err
		}
	}
	return nil
}

// fromTOML checks the type of a value and returns the text that parse reads.
func (k *Key) fromTOML(from any) (string, error) {
	switch v := from.(type) {
	case string:
		switch k.Kind {
		case Text, Choice, Size, Duration:
			return v, nil
		}
	case bool:
		if k.Kind == Flag {
			return strconv.FormatBool(v), nil
		}
	case int64:
		if k.Kind == Size || k.Kind == Count || k.Kind == Ratio {
			return strconv.FormatInt(v, 10), nil
		}
	case float64:
		if k.Kind == Ratio {
			return strconv.FormatFloat(v, 'g', -1, 64), nil
		}
	}
	want := string(k.Kind)
	switch k.Kind {
	case Choice:
		want = "one of " + strings.Join(k.Choices, ", ")
	case Size:
		want = "bytes, or text such as \"64KiB\""
	case Duration:
		want = "text such as \"30s\""
	}
	return "", fmt.Errorf("%w: %s is %s, want %s", ErrValue, k.Path(), typeName(from), want)
}

func typeName(value any) string {
	switch value.(type) {
	case string:
		return "text"
	case bool:
		return "true or false"
	case int64:
		return "a whole number"
	case float64:
		return "a number"
	case map[string]any:
		return "a table"
	case []map[string]any:
		return "a list of tables"
	case []any:
		return "a list"
	}
	return "a date or time"
}

// parse parses text according to the key's kind.
func (k *Key) parse(field reflect.Value, text string) error {
	switch field.Kind() {
	case reflect.String:
		if k.Kind == Choice && !slices.Contains(k.Choices, text) {
			return k.bad(text, "want one of "+strings.Join(k.Choices, ", ")+Suggest(text, k.Choices))
		}
		if text == k.zero {
			text = ""
		}
		field.SetString(text)
	case reflect.Bool:
		b, err := strconv.ParseBool(text)
		if err != nil {
			return k.bad(text, "want true or false")
		}
		field.SetBool(b)
	case reflect.Float64:
		f, err := strconv.ParseFloat(text, 64)
		if err != nil || !k.array && !(f >= 0 && f <= 1) {
			return k.bad(text, "want a number from 0 to 1")
		}
		field.SetFloat(f)
	default:
		n, err := k.number(text)
		switch {
		case err != nil:
			return err
		case n < k.Min && !(k.auto && n == Auto):
			if k.Min == 0 {
				return k.bad(text, "want "+k.format(0)+" or more")
			}
			return k.bad(text, "at least "+k.format(k.Min))
		case k.Max != 0 && n > k.Max:
			return k.bad(text, "at most "+k.format(k.Max))
		}
		if field.Kind() == reflect.Uint32 {
			field.SetUint(uint64(n))
		} else {
			field.SetInt(n)
		}
	}
	return nil
}

func (k *Key) number(text string) (int64, error) {
	switch {
	case k.auto && text == autoText:
		return Auto, nil
	case k.Kind == Duration:
		d, err := time.ParseDuration(text)
		if err != nil {
			return 0, k.bad(text, "want a duration such as 3ms, 30s or 1h30m")
		}
		return int64(d), nil
	case k.Kind == Size:
		n, err := ParseSize(text)
		if err != nil && k.array {
			return 0, inKey(k.Path(), err)
		} else if err != nil {
			return 0, k.bad(text, "want bytes or a size such as 64KiB, 100GiB or 2GB")
		}
		return n, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, k.bad(text, "want a whole number")
	}
	return n, nil
}

func (k *Key) bad(text, want string) error {
	return fmt.Errorf("%w: %s = %q: %s", ErrValue, k.Path(), text, want)
}

// inKey adds the key to an error about its value.
func inKey(path string, err error) error {
	if err != nil {
		err = fmt.Errorf("%s: %w", path, err)
	}
	return err
}

func (k *Key) format(n int64) string {
	switch {
	case k.auto && n == Auto:
		return autoText
	case k.Kind == Size:
		return FormatSize(n)
	case k.Kind == Duration:
		return time.Duration(n).String()
	}
	return strconv.FormatInt(n, 10)
}

// text returns the value of a field in the form that parse reads.
func (k *Key) text(field reflect.Value) string {
	switch field.Kind() {
	case reflect.String:
		return cmp.Or(field.String(), k.zero)
	case reflect.Bool:
		return strconv.FormatBool(field.Bool())
	case reflect.Float64:
		return strconv.FormatFloat(field.Float(), 'g', -1, 64)
	case reflect.Uint32:
		return strconv.FormatUint(field.Uint(), 10)
	}
	return k.format(field.Int())
}

// toml returns the value of a field as TOML. It is empty if the key is left out.
func (k *Key) toml(field reflect.Value) string {
	if k.omitEmpty && field.IsZero() {
		return ""
	}
	if v, writes := field.Addr().Interface().(value); writes {
		return v.toml()
	}
	var list []string
	switch field.Kind() {
	case reflect.Slice:
		for i := range field.Len() {
			list = append(list, k.toml(field.Index(i)))
		}
		return "[" + strings.Join(list, ", ") + "]"
	case reflect.Map:
		settings := field.Interface().(map[string]string)
		for _, name := range sorted(settings) {
			list = append(list, quote(name)+" = "+quote(settings[name]))
		}
		return "{" + strings.Join(list, ", ") + "}"
	case reflect.Struct:
		for _, inner := range k.inner {
			list = append(list, inner.Name+" = "+inner.toml(field.FieldByIndex(inner.index)))
		}
		return "{" + strings.Join(list, ", ") + "}"
	}
	text := k.text(field)
	switch k.Kind {
	case Ratio:
		if !k.array && !strings.ContainsAny(text, ".e") {
			text += ".0"
		}
		return text
	case Count, Flag:
		return text
	case Size:
		return sizeTOML(text)
	}
	return quote(text)
}

// sizeTOML returns a size as TOML: a number if it has no unit.
func sizeTOML(text string) string {
	if strings.Trim(text, "0123456789") == "" {
		return text
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

// ParseSize parses a size in bytes: a whole number, or a number with a unit (KiB or K = 1024, KB = 1000, and so on up to PiB
// and PB).
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

// FormatSize formats a size exactly, with the largest binary unit that divides it.
func FormatSize(n int64) string {
	for i := 4; i >= 0; i-- {
		if u := sizeUnits[i]; n != 0 && n%u.bytes == 0 {
			return strconv.FormatInt(n/u.bytes, 10) + u.suffix
		}
	}
	return strconv.FormatInt(n, 10)
}

// SizeText formats a size for people, in the largest binary unit. It has one digit after the point unless the number is whole.
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

// DecimalText formats a size for people in decimal units, as traces and figures do.
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

// quote returns a TOML basic string.
func quote(s string) string {
	b, _ := toml.Marshal(map[string]string{"k": strings.ToValidUTF8(s, "\uFFFD")}) // a text can always be written
	return strings.TrimSpace(strings.TrimPrefix(string(b), "k = "))
}
