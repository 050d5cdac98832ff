package devicemesh

import (
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"
)

// declared gives the matches of a pattern in include/devicemesh.h without its comments.
func declared(t *testing.T, pattern string) [][]string {
	t.Helper()
	text, err := os.ReadFile("../../include/devicemesh.h")
	if err != nil {
		t.Fatal(err)
	}
	bare := regexp.MustCompile(`(?s)/\*.*?\*/`).ReplaceAll(text, nil)
	var found [][]string
	for _, match := range regexp.MustCompile(pattern).FindAllSubmatch(bare, -1) {
		var words []string
		for _, part := range match[1:] {
			words = append(words, string(part))
		}
		found = append(found, words)
	}
	return found
}

func TestEveryFunctionIsReachable(t *testing.T) {
	// dm_last_error_info replaces dm_last_error.
	reached := map[string]bool{"dm_last_error": true}
	files, _ := filepath.Glob("*.go")
	files = append(files, "shim.h")
	calls := regexp.MustCompile(`\bC\.go_(\w+)\(|\bC\.(dm_\w+)\(|\b(dm_last_error_info)\(`)
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range calls.FindAllStringSubmatch(string(text), -1) {
			reached["dm_"+match[1]] = true
			reached[match[2]+match[3]] = true
		}
	}
	functions := declared(t, `\b(dm_\w+)\([^)]*\);`)
	if len(functions) < 80 {
		t.Fatalf("the pattern found %d functions only", len(functions))
	}
	for _, name := range functions {
		if !reached[name[0]] {
			t.Errorf("%s is called nowhere in this package", name[0])
		}
	}
}

func TestEveryStatusIsAnError(t *testing.T) {
	statuses := declared(t, `#define (DM_STATUS_\w+) (\d+)`)
	if len(statuses) < 17 {
		t.Fatalf("the pattern found %d statuses only", len(statuses))
	}
	sentinels := []Status{ErrInvalidArgument, ErrInvalidHandle, ErrNotFound, ErrNotMember, ErrBufferTooSmall, ErrMismatch, ErrTimeout, ErrStore, ErrCCL, ErrDevice,
		ErrLibrary, ErrUnsupported, ErrAborted, ErrPeerLost, ErrInternal, ErrExhausted, ErrInvalidState}
	for _, status := range statuses {
		number, _ := strconv.Atoi(status[1])
		if number == 0 {
			continue
		}
		if number > len(sentinels) {
			t.Fatalf("%s, %d, has no error here", status[0], number)
		}
		if sentinel := sentinels[number-1]; int(sentinel) != number || sentinel.Error() != status[0] {
			t.Errorf("%s is %d, not %v, %d", status[0], number, sentinel, sentinel)
		}
	}
}
