//! Tells the code of Rust source from its comments, strings and characters, as far as a guard needs it.

/// `source` with comments and the inside of literals blanked out; lines stay where they are.
pub(crate) fn code_only(source: &str) -> String {
    let bytes = source.as_bytes();
    let mut code = Vec::with_capacity(bytes.len());
    while code.len() < bytes.len() {
        let at = code.len();
        match skipped(source, at) {
            Some(end) => code.extend(bytes[at..end].iter().map(|&b| if b == b'\n' { b } else { b' ' })),
            None => code.push(bytes[at]),
        }
    }
    String::from_utf8(code).expect("whole characters were kept or blanked")
}

/// Where the comment or literal that begins at `at` ends, if one begins there.
fn skipped(source: &str, at: usize) -> Option<usize> {
    let bytes = source.as_bytes();
    let rest = &bytes[at..];
    match rest {
        [b'/', b'/', ..] => Some(find(bytes, at, b"\n").unwrap_or(bytes.len())),
        [b'/', b'*', ..] => Some(block_comment(bytes, at)),
        [b'"', ..] => Some(string(bytes, at)),
        [b'r', b'"' | b'#', ..] if !in_word(bytes, at) => raw_string(bytes, at),
        [b'\'', ..] => character(source, at),
        _ => None,
    }
}

fn find(bytes: &[u8], from: usize, what: &[u8]) -> Option<usize> {
    bytes[from..].windows(what.len()).position(|window| window == what).map(|found| from + found)
}

/// `at` goes on a word; the prefixes `b` and `c` of literals are words of their own.
fn in_word(bytes: &[u8], at: usize) -> bool {
    let part = |at: usize| bytes[at].is_ascii_alphanumeric() || bytes[at] == b'_';
    let start = if at > 0 && matches!(bytes[at - 1], b'b' | b'c') { at - 1 } else { at };
    start > 0 && part(start - 1)
}

/// Block comments nest.
fn block_comment(bytes: &[u8], at: usize) -> usize {
    let (mut end, mut depth) = (at + 2, 1);
    while depth > 0 && end < bytes.len() {
        match &bytes[end..] {
            [b'/', b'*', ..] => (end, depth) = (end + 2, depth + 1),
            [b'*', b'/', ..] => (end, depth) = (end + 2, depth - 1),
            _ => end += 1,
        }
    }
    end
}

fn string(bytes: &[u8], at: usize) -> usize {
    let mut end = at + 1;
    while end < bytes.len() && bytes[end] != b'"' {
        end += if bytes[end] == b'\\' { 2 } else { 1 };
    }
    (end + 1).min(bytes.len())
}

fn raw_string(bytes: &[u8], at: usize) -> Option<usize> {
    let hashes = bytes[at + 1..].iter().take_while(|&&b| b == b'#').count();
    let open = at + 1 + hashes;
    if bytes.get(open) != Some(&b'"') {
        return None; // a raw identifier
    }
    let close = format!("\"{}", "#".repeat(hashes));
    Some(find(bytes, open + 1, close.as_bytes()).map_or(bytes.len(), |end| end + close.len()))
}

/// `'x'` and `'\n'`, but not the lifetime `'x`.
fn character(source: &str, at: usize) -> Option<usize> {
    let rest = &source[at + 1..];
    let inside = match rest.chars().next()? {
        '\\' => 2 + rest.get(2..)?.find('\'')?,
        other => other.len_utf8(),
    };
    rest[inside..].starts_with('\'').then_some(at + 1 + inside + 1)
}

#[cfg(test)]
mod tests {
    use super::code_only;

    #[test]
    fn keeps_code_and_blanks_the_rest() {
        for (source, code) in [
            ("a // b\nc", "a     \nc"),
            ("a /* /* */ b */ c", "a               c"),
            (r#"f("x\"y", z)"#, "f(      , z)"),
            (r##"f(r#"x"y"#, br"z")"##, "f(        , b    )"),
            ("var\"x\"", "var   "),
            ("f('\"', '\\'', b'\\n', 'é', 'a)", "f(   ,     , b    ,     , 'a)"),
            ("fn f<'a>(r#in: &'a str)", "fn f<'a>(r#in: &'a str)"),
        ] {
            assert_eq!(code_only(source), code, "{source}");
        }
    }
}
