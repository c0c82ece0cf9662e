package sim

import (
	"encoding/csv"
	"fmt"
	"io"
	"reflect"
	"strings"
)

// WriteCSV prints a header and a line for each result, with the columns of the JSON form.
func (o *Outcome) WriteCSV(out io.Writer) error {
	c := csv.NewWriter(out)
	names, _ := flat(reflect.ValueOf(Result{}), "")
	_ = c.Write(names) // Flush keeps the error
	for i := range o.Results {
		_, values := flat(reflect.ValueOf(o.Results[i]), "")
		_ = c.Write(values)
	}
	c.Flush()
	return c.Error()
}

// WriteCSV prints a header and a line for each level of each result. What belongs to the level has "level" before it.
func (o *LevelOutcome) WriteCSV(out io.Writer) error {
	c := csv.NewWriter(out)
	names, _ := flat(reflect.ValueOf(LevelResult{}), "")
	ofLevel, _ := flat(reflect.ValueOf(LevelFigures{}), "level_")
	_ = c.Write(append(names, ofLevel...)) // Flush keeps the error
	for i := range o.Results {
		_, all := flat(reflect.ValueOf(o.Results[i]), "")
		for _, f := range o.Results[i].Levels {
			_, values := flat(reflect.ValueOf(f), "level_")
			_ = c.Write(append(all[:len(all):len(all)], values...))
		}
	}
	c.Flush()
	return c.Error()
}

// flat is a struct's fields, by the names they have in JSON, without lists.
func flat(v reflect.Value, prefix string) (names, values []string) {
	for i := range v.NumField() {
		name := v.Type().Field(i).Tag.Get("json")
		switch {
		case v.Field(i).Kind() == reflect.Slice:
			continue
		case !strings.HasPrefix(name, strings.TrimSuffix(prefix, "_")):
			name = prefix + name
		}
		names = append(names, name)
		values = append(values, fmt.Sprint(v.Field(i).Interface()))
	}
	return names, values
}
