package interop

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"
)

// answerBook has the right answers of one release, by setup and case.
type answerBook map[string]map[string]result

func goldenPath(r release) string { return filepath.Join("testdata", "golden", r.String()+".json") }

func loadAnswers(r release) (answerBook, error) {
	b, err := os.ReadFile(goldenPath(r))
	if err != nil {
		return nil, err
	}
	var book answerBook
	if err := json.Unmarshal(b, &book); err != nil {
		return nil, fmt.Errorf("%s: %w", goldenPath(r), err)
	}
	return book, nil
}

// rightAnswer gives what two SGLang ranks of a release make of a case.
func rightAnswer(r release, setup, name string) (result, error) {
	book, err := loadAnswers(r)
	if err != nil {
		return result{}, err
	}
	right, ok := book[setup][name]
	if !ok {
		return result{}, fmt.Errorf("%s has no answer to %s/%s: go test ./interop -run TestSGLangPairs -update", goldenPath(r), setup, name)
	}
	return right, nil
}

// updates serialises the writing of answers.
var updates sync.Mutex

// saveAnswers replaces the answers of one setup.
func saveAnswers(t *testing.T, r release, setup string, answers map[string]result) {
	t.Helper()
	updates.Lock()
	defer updates.Unlock()
	book, err := loadAnswers(r)
	if errors.Is(err, fs.ErrNotExist) {
		book, err = answerBook{}, nil
	}
	if err != nil {
		t.Fatal(err)
	}
	book[setup] = answers
	b, err := json.MarshalIndent(book, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(goldenPath(r)), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(goldenPath(r), append(b, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
}
