package config

import (
	"fmt"
	"time"
)

func asSize(path string, value any) (int64, error) {
	switch v := value.(type) {
	case int64:
		return v, nil
	case string:
		n, err := ParseSize(v)
		return n, inKey(path, err)
	}
	return 0, fmt.Errorf("%w: %s is %s, want bytes, or text such as \"100GiB\"", ErrValue, path, typeName(value))
}

// inKey puts a key before an error of its value.
func inKey(path string, err error) error {
	if err != nil {
		err = fmt.Errorf("%s: %w", path, err)
	}
	return err
}

func asSpan(path string, value any) (time.Duration, error) {
	text, err := asText(path, value)
	if err != nil {
		return 0, err
	}
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 {
		return 0, fmt.Errorf("%w: %s %q: want a duration such as \"3ms\", 0s or more", ErrValue, path, text)
	}
	return d, nil
}

func asFlag(path string, value any) (bool, error) {
	on, ok := value.(bool)
	if !ok {
		return false, fmt.Errorf("%w: %s is %s, want true or false", ErrValue, path, typeName(value))
	}
	return on, nil
}

func asText(path string, value any) (string, error) {
	s, ok := value.(string)
	if !ok {
		return "", fmt.Errorf("%w: %s is %s, want text", ErrValue, path, typeName(value))
	}
	return s, nil
}

func asCount(path string, value any) (int64, error) {
	n, ok := value.(int64)
	if !ok || n < 0 {
		return 0, fmt.Errorf("%w: %s is %s, want a whole number, 0 or more", ErrValue, path, typeName(value))
	}
	return n, nil
}

func asInt(path string, value any) (int, error) {
	n, err := asCount(path, value)
	return int(n), err
}

func asNumber(path string, value any) (float64, error) {
	switch v := value.(type) {
	case int64:
		return float64(v), nil
	case float64:
		return v, nil
	}
	return 0, fmt.Errorf("%w: %s is %s, want a number", ErrValue, path, typeName(value))
}

// asList reads a list of what one reads.
func asList[V any](of string, one func(path string, value any) (V, error)) func(path string, value any) ([]V, error) {
	return func(path string, value any) ([]V, error) {
		list, ok := value.([]any)
		if !ok {
			return nil, fmt.Errorf("%w: %s is %s, want a list of %s", ErrValue, path, typeName(value), of)
		}
		var out []V
		for _, v := range list {
			x, err := one(path, v)
			if err != nil {
				return nil, err
			}
			out = append(out, x)
		}
		return out, nil
	}
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
