//! The environment of chat templates: that of `transformers`, with Python's operators, filters and methods.

use super::{
    clock, filters, methods,
    objects::{Generator, Labelled, Tuple, cycler, joiner, range},
    operators,
    text::{self, refuse, str},
};
use minijinja::{
    Environment, Error, Output, State, Value,
    value::{Object, Rest, ValueKind},
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// Instructions of one rendering. A conversation of 10,000 turns takes about 100 per turn.
const MAX_INSTRUCTIONS: u64 = 3_000_000;

/// Bytes that one rendering prints, those of macros and captured blocks included.
pub(super) const MAX_OUTPUT: usize = 32 << 20;

/// The longest rendering; a conversation of 10,000 turns takes a tenth of it.
const MAX_TIME: Duration = Duration::from_secs(1);

/// Items of all values that namespaces keep, and the nesting of one.
const MAX_KEPT: usize = 4 << 20;
const MAX_KEPT_DEPTH: usize = 24;

/// Nested calls of macros, loops and includes.
const MAX_NESTING: usize = 100;

/// Filters, tests and functions of minijinja that Jinja2 does not have, or that would escape text.
const FOREIGN_FILTERS: [&str; 8] = ["split", "lines", "bool", "chain", "zip", "escape", "e", "groupby"];
const FOREIGN_TESTS: [&str; 5] = ["startingwith", "endingwith", "safe", "escaped", "int"];

/// An environment with the settings of `transformers`.
pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_fuel(Some(MAX_INSTRUCTIONS));
    environment.set_recursion_limit(MAX_NESTING);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(methods::call);
    environment.set_formatter(print);
    FOREIGN_FILTERS.iter().for_each(|name| environment.remove_filter(name));
    FOREIGN_TESTS.iter().for_each(|name| environment.remove_test(name));
    environment.remove_global("debug");
    environment.add_function("__tuple", |items: Vec<Value>| Value::from_object(Tuple(items)));
    environment.add_function("range", range);
    environment.add_function("joiner", joiner);
    environment.add_function("cycler", |items: Rest<Value>| cycler(items.0));
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("__str", |value: &Value| str(value));
    environment.add_filter("__sized", sized);
    environment.add_filter("__mod", operators::modulo);
    environment.add_filter("__div", operators::divide);
    environment.add_filter("__floordiv", operators::floor_divide);
    environment.add_filter("__compare", operators::compare);
    environment.add_filter("__in", |item: &Value, container: &Value| operators::contains(container, item));
    environment.add_filter("__not_in", |item: &Value, container: &Value| {
        operators::contains(container, item).map(|found| !found)
    });
    environment
        .add_filter("__timed", |state: &State<'_, '_>, value: Value| check_time(state).map(|()| value));
    environment.add_filter("__kept", kept);
    environment.add_filter("__iterable", iterable);
    environment.add_test("in", |item: &Value, container: &Value| operators::contains(container, item));
    filters::add(&mut environment);
    environment
}

/// The part of its budget that a rendering has used.
#[derive(Debug)]
struct Used {
    /// Bytes printed.
    printed: AtomicUsize,
    /// Items of values that namespaces kept.
    kept: AtomicUsize,
    since: Instant,
}

impl Object for Used {}

impl Used {
    fn of(state: &State<'_, '_>) -> Arc<Self> {
        state.get_or_set_temp_object("used", || Self {
            printed: AtomicUsize::new(0),
            kept: AtomicUsize::new(0),
            since: Instant::now(),
        })
    }
}

/// Instructions are counted, but one of them may compare or search a long text.
fn check_time(state: &State<'_, '_>) -> Result<(), Error> {
    if Used::of(state).since.elapsed() > MAX_TIME {
        return Err(refuse(format!("it takes longer than {} s", MAX_TIME.as_secs())));
    }
    Ok(())
}

/// A value that a namespace keeps. Only such values live from one turn of a loop to the next, so their nesting and size bound
/// those of every value. Without a bound, freeing a nested list would exhaust the stack.
fn kept(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    fn weigh(value: &Value, depth: usize, left: &mut usize) -> Result<(), Error> {
        *left = left.checked_sub(1).ok_or_else(|| refuse("a namespace keeps too many items"))?;
        if let Some(text) = value.as_str() {
            return if text.len() > text::MAX_TEXT {
                Err(refuse("a namespace keeps too long a text"))
            } else {
                Ok(())
            };
        }
        if !matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) {
            return Ok(());
        }
        if depth == MAX_KEPT_DEPTH {
            return Err(refuse("a namespace keeps lists that are nested too deep"));
        }
        for item in value.try_iter()? {
            if value.kind() == ValueKind::Map {
                weigh(&value.get_item(&item)?, depth + 1, left)?;
            }
            weigh(&item, depth + 1, left)?;
        }
        Ok(())
    }
    check_time(state)?;
    let used = Used::of(state);
    let before = MAX_KEPT - used.kept.load(Ordering::Relaxed).min(MAX_KEPT);
    let mut left = before;
    weigh(&value, 0, &mut left)?;
    used.kept.fetch_add(before - left, Ordering::Relaxed);
    Ok(value)
}

fn print(out: &mut Output<'_>, state: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    if value.downcast_object_ref::<Generator>().is_some() {
        return Err(refuse("a generator has no text; use the filter `list`"));
    }
    check_time(state)?;
    let text = str(value)?;
    if Used::of(state).printed.fetch_add(text.len(), Ordering::Relaxed) + text.len() > MAX_OUTPUT {
        return Err(refuse(format!("the output exceeds {} MiB", MAX_OUTPUT >> 20)));
    }
    out.write_str(&text).map_err(Error::from)
}

/// An operand of `+`, unless it is too long: a sum in a loop may double its length each time.
fn sized(value: Value) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        return if text.len() > text::MAX_TEXT {
            Err(refuse("a text is too long for `+`"))
        } else {
            Ok(value)
        };
    }
    match value.len() {
        // minijinja would make a list of it.
        _ if value.downcast_object_ref::<Tuple>().is_some() => Err(refuse("`+` of tuples is not supported")),
        _ if value.downcast_object_ref::<Labelled>().is_some() => {
            Err(refuse("unsupported operand type for `+`: a range or a view of a dict"))
        }
        Some(len) if value.kind() != ValueKind::Map && len > text::MAX_TEXT / 64 => {
            Err(refuse("a list is too long for `+`"))
        }
        _ => Ok(value),
    }
}

/// The items of a loop. minijinja takes none for an empty list, and does not count the characters of a text.
fn iterable(state: &State<'_, '_>, value: Value) -> Result<Value, Error> {
    check_time(state)?;
    match value.kind() {
        ValueKind::None | ValueKind::Bool | ValueKind::Number => {
            Err(refuse(format!("a {} is not iterable", value.kind())))
        }
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            Ok(text.chars().map(|c| Value::from(c.to_string())).collect())
        }
        _ => Ok(value),
    }
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    Err(refuse(str(message)?))
}

fn strftime_now(format: &str) -> Result<String, Error> {
    clock::strftime_now(format).map_err(|code| refuse(format!("strftime_now does not know the code %{code}")))
}
