// Package drive is the part of a serving engine that talks to a host: sessions, memory for pages, keys, and jobs.
//
// It has two users. Package replay plans requests from a trace, and compares the loaded pages with their expected
// content. Package bench plans passes over the same chunks, and compares their times with the machine's limits. Both
// store and load through [Rank], from pages of [Memory] or of a GPU. [Blocks] draws new blocks for each job, so that
// neither stale bytes nor a wrong block can look right.
package drive
