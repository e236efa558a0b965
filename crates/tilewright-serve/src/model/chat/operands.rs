//! The operands of Python's operators among the tokens of a tag, by how strongly each operator binds.

use super::token::{Kind, Level, Token};

/// Texts to insert before and after each token.
pub(super) struct Insertions {
    pub(super) before: Vec<String>,
    /// With the first token of the operand: an inner operand starts later and closes first.
    pub(super) after: Vec<Vec<(usize, &'static str)>>,
}

impl Insertions {
    fn wrap(&mut self, start: usize, end: usize, close: &'static str) {
        self.before[start].push('(');
        self.after[end].push((start, close));
    }
}

/// Rewrites the operators of an expression that starts at `first`.
pub(super) fn wrap_operands(tokens: &mut [Token], first: usize, insertions: &mut Insertions) {
    for at in first..tokens.len() {
        wrap_containment(tokens, at, first, insertions);
        if tokens[at].kind != Kind::Operator || !is_binary(tokens, at, first) {
            continue;
        }
        let operator = tokens[at].text.clone();
        let function = match operator.as_str() {
            "~" | "+" => {
                let Some((start, end)) = extent(tokens, at, first, Level::Sum) else { continue };
                let close = if operator == "~" { ")|__str" } else { ")|__sized" };
                insertions.wrap(start, at - 1, close);
                insertions.wrap(at + 1, end, close);
                continue;
            }
            "%" => ")|__mod(".to_owned(),
            "/" => ")|__div(".to_owned(),
            "//" => ")|__floordiv(".to_owned(),
            "==" | "!=" | "<" | ">" | "<=" | ">=" => format!(")|__compare(\"{operator}\","),
            _ => continue,
        };
        let level = if function.ends_with('(') { Level::Product } else { Level::Comparison };
        let Some((start, end)) = extent(tokens, at, first, level) else { continue };
        if level == Level::Comparison && is_chained(tokens, start, end, first) {
            continue;
        }
        insertions.before[start].push('(');
        insertions.after[end].push((at, ")"));
        tokens[at].text = function;
        tokens[at].level = Some(level);
    }
}

/// Turns `a in b` and `a not in b` into calls.
fn wrap_containment(tokens: &mut [Token], at: usize, first: usize, insertions: &mut Insertions) {
    let is = |at: usize, name: &str| tokens[at].kind == Kind::Name && tokens[at].text == name;
    if !is(at, "in") || at == first || is(at - 1, "is") {
        return;
    }
    let negated = is(at - 1, "not");
    let operator = if negated { at - 1 } else { at };
    if operator == first || is(operator - 1, "is") || !ends_operand(tokens, operator - 1) {
        return;
    }
    let (Some((start, _)), Some((_, end))) =
        (extent(tokens, operator, first, Level::Comparison), extent(tokens, at, first, Level::Comparison))
    else {
        return;
    };
    if is_chained(tokens, start, end, first) {
        return;
    }
    insertions.before[start].push('(');
    insertions.after[end].push((at, ")"));
    tokens[operator].text = if negated { ")|__not_in(" } else { ")|__in(" }.to_owned();
    tokens[operator].kind = Kind::Operator;
    tokens[operator].level = Some(Level::Comparison);
    if negated {
        tokens[at].text.clear();
    }
}

/// Whether another comparison is next to the operands; Python evaluates both with one value.
fn is_chained(tokens: &[Token], start: usize, end: usize, first: usize) -> bool {
    let comparison = |at: usize| {
        let name = matches!(tokens[at].text.as_str(), "in" | "not") && tokens[at].kind == Kind::Name;
        level_of(&tokens[at]) == Some(Level::Comparison) || name
    };
    // A `not` before the operands negates the whole comparison.
    let before = start > first && comparison(start - 1) && tokens[start - 1].text != "not";
    before || end + 1 < tokens.len() && comparison(end + 1)
}

/// The level of an operator, which may have been rewritten.
fn level_of(token: &Token) -> Option<Level> {
    if token.kind != Kind::Operator {
        return None;
    }
    token.level.or(match token.text.as_str() {
        "==" | "!=" | "<" | ">" | "<=" | ">=" => Some(Level::Comparison),
        "+" | "-" | "~" => Some(Level::Sum),
        "*" | "/" | "//" | "%" => Some(Level::Product),
        _ => None,
    })
}

/// First and last token of the operands around an operator.
fn extent(tokens: &[Token], at: usize, first: usize, level: Level) -> Option<(usize, usize)> {
    let operator = Operator { tokens, first, level, depth: tokens[at].depth };
    let mut start = at;
    while start > first && !operator.is_limit(start - 1, false) {
        start -= 1;
    }
    let mut end = at;
    while end + 1 < tokens.len() && !operator.is_limit(end + 1, true) {
        end += 1;
    }
    // The `in` of `not in` counts as its right operand here, and is a limit of the left one.
    let missing = end == at && tokens[at].text != "not";
    (start < at && !missing || tokens[at].text == "in" && end > at).then_some((start, end))
}

/// An operator among the tokens of a tag.
struct Operator<'a> {
    tokens: &'a [Token],
    /// The first token of the expression.
    first: usize,
    level: Level,
    depth: usize,
}

impl Operator<'_> {
    /// Whether the token at `at` is no part of an operand, on the right side or the left.
    fn is_limit(&self, at: usize, right: bool) -> bool {
        let Self { tokens, first, level, depth } = *self;
        let token = &tokens[at];
        if token.depth != depth || token.kind == Kind::String {
            return token.depth < depth;
        }
        let after_is =
            |at: usize| at > first && tokens[at - 1].text == "is" && tokens[at - 1].kind == Kind::Name;
        match level_of(token) {
            Some(Level::Comparison) => return true,
            Some(Level::Sum) if token.text == "~" => return level != Level::Comparison,
            Some(Level::Sum) => return level != Level::Comparison && is_binary(tokens, at, first),
            Some(Level::Product) => return level == Level::Product && right,
            None => {}
        }
        match token.text.as_str() {
            "," | ":" | "=" => true,
            "and" | "or" | "if" | "else" | "recursive" => true,
            "not" => !after_is(at),
            "in" => {
                let after_is_not = at > first && tokens[at - 1].text == "not" && after_is(at - 1);
                !after_is(at) && !after_is_not
            }
            _ => false,
        }
    }
}

/// Whether the operator at `at` has an operand before it.
fn is_binary(tokens: &[Token], at: usize, first: usize) -> bool {
    at > first && ends_operand(tokens, at - 1)
}

fn ends_operand(tokens: &[Token], at: usize) -> bool {
    match tokens[at].kind {
        Kind::String | Kind::Number => true,
        Kind::Name => !is_keyword(&tokens[at].text),
        Kind::Operator => matches!(tokens[at].text.as_str(), ")" | "]" | "}"),
    }
}

fn is_keyword(name: &str) -> bool {
    matches!(name, "and" | "or" | "not" | "in" | "is" | "if" | "else" | "elif" | "recursive")
}

/// Turns parentheses that are no call and hold a comma, or nothing, into a tuple.
pub(super) fn wrap_tuples(tokens: &mut [Token], first: usize) -> Result<(), String> {
    for open in first..tokens.len() {
        if tokens[open].text != "(" || tokens[open].kind != Kind::Operator {
            continue;
        }
        if open > 0 && ends_operand(tokens, open - 1) {
            continue;
        }
        let depth = tokens[open].depth;
        let Some(close) = (open + 1..tokens.len()).find(|&at| tokens[at].depth == depth) else { continue };
        let is_comma =
            |token: &Token| token.depth == depth + 1 && token.kind == Kind::Operator && token.text == ",";
        let comma = tokens[open + 1..close].iter().any(is_comma);
        if comma || close == open + 1 {
            // minijinja would make a list of it.
            let operator =
                |at: Option<&Token>| at.is_some_and(|token| ["[", "*"].contains(&token.text.as_str()));
            if operator(tokens.get(close + 1)) || open > first && tokens[open - 1].text == "*" {
                return Err("a tuple that is sliced or repeated is not supported".to_owned());
            }
            "__tuple([".clone_into(&mut tokens[open].text);
            "])".clone_into(&mut tokens[close].text);
        }
    }
    Ok(())
}

/// Refuses constructs that minijinja evaluates otherwise.
pub(super) fn refuse_constructs(tokens: &[Token], first: usize) -> Result<(), String> {
    let operator =
        |at: usize, text: &str| tokens.get(at).is_some_and(|t| t.kind == Kind::Operator && t.text == text);
    let is_sum = (first..tokens.len()).any(|at| operator(at, "+") && is_binary(tokens, at, first));
    for (at, token) in tokens.iter().enumerate().skip(first) {
        let name = if token.kind == Kind::Name { token.text.as_str() } else { "" };
        if is_sum && name == "safe" && at > first && operator(at - 1, "|") {
            return Err("a sum with `safe` is not supported: Jinja2 escapes the other texts".to_owned());
        }
        if name == "safe" && at > first && operator(at - 1, "|") && is_part(tokens, first, at) {
            return Err("a safe text in a list, a call or before a method is not supported".to_owned());
        }
        if name == "and"
            && at > first
            && is_constant_between(tokens, at - 1)
            && is_constant_between(tokens, at + 1)
        {
            return Err("`and` of two constants is not supported".to_owned());
        }
        if at == first || !operator(at - 1, ")") {
            continue;
        }
        let sliced = operator(at, "[")
            && tokens[at + 1..]
                .iter()
                .take_while(|t| t.depth > token.depth)
                .any(|t| t.depth == token.depth + 1 && t.text == ":" && t.kind == Kind::Operator);
        let [power, repeated] = ["**", "*"].map(|text| operator(at, text));
        if !sliced && !power && !repeated {
            continue;
        }
        let (open, close) = innermost(tokens, at - 1);
        let called = if open > first && tokens[open - 1].kind == Kind::Name {
            tokens[open - 1].text.as_str()
        } else {
            ""
        };
        let comma =
            (open + 1..close).any(|at| tokens[at].depth == tokens[open].depth + 1 && operator(at, ","));
        let tuple = called.is_empty() && comma || holds_tuple(tokens, open, close);
        let is_named =
            |name: &str| tokens[open..close].iter().any(|t| t.kind == Kind::Name && t.text == name);
        let range = called == "range" || is_named("range") && !is_named("list");
        if sliced && range || (sliced || repeated) && tuple {
            return Err("a range or tuple that is sliced or repeated is not supported".to_owned());
        }
        if power && operator(open + 1, "-") {
            return Err("a power of a negative number is not supported".to_owned());
        }
    }
    Ok(())
}

/// Whether the value at `at` is in brackets other than plain parentheses, or a method of those is called.
fn is_part(tokens: &[Token], first: usize, at: usize) -> bool {
    let mut depth = tokens[at].depth;
    for open in (first..at).rev().filter(|&open| tokens[open].kind == Kind::Operator) {
        if tokens[open].depth + 1 != depth || !matches!(tokens[open].text.as_str(), "(" | "[" | "{") {
            continue;
        }
        depth -= 1;
        let close = (at..tokens.len()).find(|&close| tokens[close].depth == depth);
        let is_plain = tokens[open].text == "(" && !(open > first && ends_operand(tokens, open - 1));
        if !is_plain || close.and_then(|close| tokens.get(close + 1)).is_some_and(|next| next.text == ".") {
            return true;
        }
    }
    false
}

/// Refuses `in` after the name of a test: Jinja2 takes it for the argument of the test.
pub(super) fn refuse_test_of_in(tokens: &[Token], first: usize) -> Result<(), String> {
    let name = |at: usize, text: &str| tokens[at].kind == Kind::Name && tokens[at].text == text;
    for at in first + 2..tokens.len() {
        let test = name(at - 2, "is") && !name(at - 1, "not")
            || at > first + 2 && name(at - 3, "is") && name(at - 2, "not");
        if test && name(at, "in") && tokens[at - 1].kind == Kind::Name {
            return Err("`in` after a test needs parentheses".to_owned());
        }
    }
    Ok(())
}

/// Whether one of the parentheses between `open` and `close` is a tuple.
fn holds_tuple(tokens: &[Token], open: usize, close: usize) -> bool {
    let operator = |at: usize, text: &str| tokens[at].kind == Kind::Operator && tokens[at].text == text;
    let is_tuple = |at: usize| {
        let inside = (at + 1..close).take_while(|&inner| tokens[inner].depth > tokens[at].depth);
        let mut commas =
            inside.filter(|&inner| tokens[inner].depth == tokens[at].depth + 1 && operator(inner, ","));
        commas.next().is_some()
    };
    let parenthesis = |at: usize| operator(at, "(") && (at == 0 || !ends_operand(tokens, at - 1));
    (open + 1..close).any(|at| parenthesis(at) && is_tuple(at))
}

/// Whether the token at `at` is a number or a named constant, and no operand of an arithmetic operator or a comparison.
fn is_constant_between(tokens: &[Token], at: usize) -> bool {
    let is_constant = |token: &Token| {
        let names = ["true", "false", "none", "True", "False", "None"];
        token.kind == Kind::Number || token.kind == Kind::Name && names.contains(&token.text.as_str())
    };
    let is_limit = |token: &Token| match token.kind {
        Kind::Operator => ["(", ")", "[", "]", ","].contains(&token.text.as_str()),
        _ => ["and", "or", "if", "else"].contains(&token.text.as_str()),
    };
    let before = at.checked_sub(1).and_then(|before| tokens.get(before));
    tokens.get(at).is_some_and(is_constant)
        && before.is_none_or(is_limit)
        && tokens.get(at + 1).is_none_or(is_limit)
}

/// The parentheses that end at `close`, or those of the tuple or call that is all of their content.
fn innermost(tokens: &[Token], mut close: usize) -> (usize, usize) {
    let opening = |close: usize| {
        (0..close)
            .rev()
            .find(|&at| tokens[at].depth == tokens[close].depth && tokens[at].text == "(")
            .unwrap_or(0)
    };
    let mut open = opening(close);
    while open + 1 < close && tokens[close - 1].text == ")" {
        let inner = opening(close - 1);
        let is_call = inner == open + 2 && tokens[open + 1].kind == Kind::Name;
        if inner != open + 1 && !is_call {
            break;
        }
        (open, close) = (inner, close - 1);
    }
    (open, close)
}
