// Package changelog is the bounded log of what becomes resident in a store and what goes. A reader resumes after a
// sequence number as long as the log still holds what follows; otherwise it starts again from a snapshot.
package changelog
