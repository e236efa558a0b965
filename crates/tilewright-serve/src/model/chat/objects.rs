//! Objects of templates that minijinja lacks: tuples, generators, `joiner` and `cycler`.

use super::text::refuse;
use minijinja::{
    Error, State, Value,
    value::{Enumerator, Object, ObjectRepr},
};
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

/// A list that prints with parentheses.
#[derive(Debug)]
pub(super) struct Tuple(pub(super) Vec<Value>);

impl Object for Tuple {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.0.len())
    }
}

pub(super) fn pair(key: Value, value: Value) -> Value {
    Value::from_object(Tuple(vec![key, value]))
}

/// The result of a lazy filter: it iterates, but has neither length nor text.
#[derive(Debug)]
pub(super) struct Generator(pub(super) Vec<Value>);

impl Object for Generator {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.0.clone())
    }

    // A generator is true, even if it yields nothing.
    fn is_true(self: &Arc<Self>) -> bool {
        true
    }
}

/// Items with a text of their own: `range(0, 3)`, and `dict_keys(['a'])` and the like.
#[derive(Debug)]
pub(super) struct Labelled {
    pub(super) items: Vec<Value>,
    pub(super) label: Label,
}

/// The text of [`Labelled`] items.
#[derive(Debug)]
pub(super) enum Label {
    /// The whole text.
    Text(String),
    /// A name before the list of items.
    View(&'static str),
}

impl Object for Labelled {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        match self.label {
            Label::Text(_) => ObjectRepr::Seq,
            // A view of a dict has no positions.
            Label::View(_) => ObjectRepr::Iterable,
        }
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.items.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.items.clone())
    }
}

/// The longest `range`, as in the sandbox of Jinja2.
const MAX_RANGE: usize = 100_000;

/// `range(stop)` or `range(start, stop, step)`.
pub(super) fn range(first: i64, second: Option<i64>, step: Option<i64>) -> Result<Value, Error> {
    let (start, stop) = second.map_or((0, first), |second| (first, second));
    let step = step.unwrap_or(1);
    if step == 0 {
        return Err(refuse("range() arg 3 must not be zero"));
    }
    let inside = |value: &i64| if step > 0 { *value < stop } else { *value > stop };
    let values = std::iter::successors(Some(start), |value| value.checked_add(step)).take_while(inside);
    let items: Vec<Value> = values.take(MAX_RANGE + 1).map(Value::from).collect();
    if items.len() > MAX_RANGE {
        return Err(refuse(format!("Range too big. The sandbox blocks ranges larger than {MAX_RANGE}.")));
    }
    let steps = if step == 1 { String::new() } else { format!(", {step}") };
    let label = Label::Text(format!("range({start}, {stop}{steps})"));
    Ok(Value::from_object(Labelled { items, label }))
}

/// A view of a dict, such as `dict_keys`.
pub(super) fn view(name: &'static str, items: Vec<Value>) -> Value {
    Value::from_object(Labelled { items, label: Label::View(name) })
}

/// `joiner(sep)`: empty on the first call, then `sep`.
#[derive(Debug)]
struct Joiner {
    separator: Value,
    used: AtomicBool,
}

impl Object for Joiner {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _: &State<'_, '_>, _: &[Value]) -> Result<Value, Error> {
        let used = self.used.swap(true, Ordering::Relaxed);
        Ok(if used { self.separator.clone() } else { Value::from("") })
    }
}

pub(super) fn joiner(separator: Option<Value>) -> Value {
    let separator = separator.unwrap_or_else(|| Value::from(", "));
    Value::from_object(Joiner { separator, used: AtomicBool::new(false) })
}

/// `cycler(a, b, ...)`: `next` returns each in turn.
#[derive(Debug)]
struct Cycler {
    items: Vec<Value>,
    position: AtomicUsize,
}

impl Object for Cycler {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let position = self.position.load(Ordering::Relaxed);
        (key.as_str()? == "current").then(|| self.items[position % self.items.len()].clone())
    }

    fn call_method(self: &Arc<Self>, _: &State<'_, '_>, method: &str, _: &[Value]) -> Result<Value, Error> {
        match method {
            "next" => {
                let position = self.position.fetch_add(1, Ordering::Relaxed);
                Ok(self.items[position % self.items.len()].clone())
            }
            "reset" => {
                self.position.store(0, Ordering::Relaxed);
                Ok(Value::from(()))
            }
            _ => Err(refuse(format!("a cycler has no method {method}"))),
        }
    }
}

pub(super) fn cycler(items: Vec<Value>) -> Result<Value, Error> {
    if items.is_empty() {
        return Err(refuse("at least one item has to be provided"));
    }
    Ok(Value::from_object(Cycler { items, position: AtomicUsize::new(0) }))
}
