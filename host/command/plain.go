package command

import "regexp"

// packages matches the package names at the beginning of errors. They are useful only for developers.
var packages = regexp.MustCompile(`(^|[:;,] |\n)(?:(?:bench|budget|capacity|catalog|client|config|doctor|fsck|gds|host|` +
	`kvhost|memfs|meter|minisign|policy|regular|replay|sandbox|scaffold|server|sim|staging|store|trace|transfer): )+`)

// plainError returns an error's text without the names of packages.
func plainError(err error) string { return plainText(err.Error()) }

func plainText(text string) string { return packages.ReplaceAllString(text, "$1") }
