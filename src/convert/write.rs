//! Writing a model in the other layout, or in its own with another type of elements.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use super::Error;
use super::export::family;
use super::folder::{GENERATION, KEPT, ModelFolder, ModelKind, RECIPE, TOKENIZER, expected};
use super::foreign_config::CONFIG;
use crate::checkpoint::{ElementType, NewFolder, TensorKind, TensorList, TensorView, write_tensors};
use crate::config::StorageType;
use crate::data::Tokenizer;

/// What a conversion has made.
#[derive(Debug)]
pub struct Converted {
    /// The name of the family in its layout.
    pub family: &'static str,
    pub kind: ModelKind,
}

/// Writes a model as `folder`, which must not exist, in the layout `to`, with elements of `dtype`, or else of the types that
/// it has. No file of tensors has more than `file_bytes`, unless a tensor has. Either the folder is whole or it has no such
/// name.
///
/// # Errors
/// A model or a type that the layout does not have; what cannot be read or written.
pub fn convert(
    model: &ModelFolder,
    to: ModelKind,
    dtype: Option<ElementType>,
    file_bytes: u64,
    folder: &Path,
) -> Result<Converted, Error> {
    match to {
        ModelKind::Guildhall => to_own(model, dtype, file_bytes, folder),
        ModelKind::HuggingFace => to_foreign(model, dtype, file_bytes, folder),
    }
}

fn to_own(model: &ModelFolder, dtype: Option<ElementType>, file_bytes: u64, folder: &Path) -> Result<Converted, Error> {
    let mut config = model.config.clone();
    config.train.dtype = match dtype {
        None => config.train.dtype,
        Some(ElementType::F32) => StorageType::F32,
        Some(ElementType::Bf16) => StorageType::Bf16,
        Some(ElementType::F16 | ElementType::U8 | ElementType::F8E4M3) => {
            let reason =
                "--dtype f16: models are trained here as f32 or bf16; leave it out to keep every value".to_owned();
            return Err(Error::Request { reason });
        }
    };
    config.train.init = None;
    let (here, tensors) = (model.files.list(), expected(&config));
    let kept =
        KEPT.iter().chain([&TOKENIZER]).filter_map(|name| Some(((*name).to_owned(), model.small(name)?.clone())));
    let small = kept.chain([(RECIPE.to_owned(), config.to_toml().into_bytes())]).collect();
    let new = NewFolder {
        folder,
        kind: TensorKind::Model,
        tensors: &tensors,
        file_bytes,
        small,
        fingerprint: Some(String::new()),
    };
    write_tensors(new, |name| fitted(name, (here[name].0, model.files.read(name)?), tensors[name].0))?;
    Ok(Converted { family: config.model.family.name(), kind: ModelKind::Guildhall })
}

fn to_foreign(
    model: &ModelFolder,
    dtype: Option<ElementType>,
    file_bytes: u64,
    folder: &Path,
) -> Result<Converted, Error> {
    let main = dtype.unwrap_or(match model.config.train.dtype {
        StorageType::F32 => ElementType::F32,
        StorageType::Bf16 => ElementType::Bf16,
    });
    let (family, object) = family(model, torch_name(main))?;
    let experts = model.config.moe.as_ref().map_or(1, |moe| moe.experts.smallest());
    let views = family.layout(&model.files.list(), experts);
    let nearest = family.model_type;
    let no_place = |problems| Error::NoFamily { folder: model.folder.clone(), nearest, problems };
    let plan = Assembly::new(model, views.map_err(no_place)?, main, dtype.is_none())?;
    let (mut object, end) = (object, end_of_text(model)?);
    // Classes of transformers have numbers of their own where the file has none.
    object.entry("eos_token_id").or_insert(json!(end));
    let config = serde_json::to_vec_pretty(&Value::Object(object)).expect("JSON");
    let mut small: BTreeMap<String, Vec<u8>> = model.small.clone();
    small.insert(CONFIG.to_owned(), config);
    if !small.contains_key(GENERATION) {
        small.insert(GENERATION.to_owned(), generation(model, end));
    }
    let new = NewFolder {
        folder,
        kind: TensorKind::Model,
        tensors: &plan.tensors,
        file_bytes,
        small: small.into_iter().collect(),
        fingerprint: None,
    };
    write_tensors(new, |name| plan.assemble(name))?;
    Ok(Converted { family: nearest, kind: ModelKind::HuggingFace })
}

/// A tensor's elements as those of another type, if all of them have values there.
pub(super) fn fitted(name: &str, (from, bytes): (ElementType, Vec<u8>), to: ElementType) -> Result<Vec<u8>, Error> {
    let converted = from.converted(bytes, to);
    let beyond = || format!("{name} has values beyond those of {}: name another --dtype, or none", to.name());
    if to.are_finite(&converted) { Ok(converted) } else { Err(Error::Request { reason: beyond() }) }
}

/// The name of a type in `config.json`.
fn torch_name(dtype: ElementType) -> &'static str {
    match dtype {
        ElementType::F32 => "float32",
        ElementType::Bf16 => "bfloat16",
        ElementType::F16 => "float16",
        ElementType::U8 | ElementType::F8E4M3 => unreachable!("no weight is of it"),
    }
}

/// The token that ends a text.
fn end_of_text(model: &ModelFolder) -> Result<u32, Error> {
    let end = model.config.data.end_of_text.as_deref();
    let json = model.small(TOKENIZER).expect("every model has a tokenizer");
    Ok(Tokenizer::from_json(json, &model.folder.join(TOKENIZER), end)?.end_of_text())
}

/// Where text ends, which is all that is known of how to write it.
fn generation(model: &ModelFolder, end: u32) -> Vec<u8> {
    let mut object = json!({ "eos_token_id": end });
    if model.config.model.blueprint().reads_a_source() {
        object["decoder_start_token_id"] = json!(end);
        object["pad_token_id"] = json!(1);
    }
    serde_json::to_vec_pretty(&object).expect("JSON")
}

/// Tensors of another layout, each with those here that it is made of.
struct Assembly<'a> {
    model: &'a ModelFolder,
    tensors: TensorList,
    parts: BTreeMap<String, Vec<(String, TensorView)>>,
}

impl<'a> Assembly<'a> {
    /// Elements are of type `main`. If that is only how the model is stored, tensors that have more bits keep them where
    /// they need them.
    fn new(
        model: &'a ModelFolder,
        views: BTreeMap<String, TensorView>,
        main: ElementType,
        keeps: bool,
    ) -> Result<Assembly<'a>, Error> {
        let mut parts: BTreeMap<String, Vec<(String, TensorView)>> = BTreeMap::new();
        for (name, view) in views {
            parts.entry(view.tensor.clone()).or_default().push((name, view));
        }
        let mut tensors = TensorList::new();
        for (name, parts) in &parts {
            let (_, first) = &parts[0];
            let shape = first.cut.whole(&first.shape);
            let elements: usize = parts.iter().map(|(_, part)| part.shape.iter().product::<usize>()).sum();
            assert_eq!(elements, shape.iter().product::<usize>(), "parts of {name}");
            let mut dtype = main;
            for (own, view) in parts.iter().filter(|(_, view)| keeps && view.dtype != main) {
                let bytes = model.files.read(own)?;
                let rounded = main.converted(view.dtype.converted(bytes.clone(), main), view.dtype);
                dtype = if rounded == bytes { dtype } else { ElementType::F32 };
            }
            tensors.insert(name.clone(), (dtype, shape));
        }
        Ok(Assembly { model, tensors, parts })
    }

    fn assemble(&self, name: &str) -> Result<Vec<u8>, Error> {
        let ((dtype, shape), parts) = (&self.tensors[name], &self.parts[name]);
        let read = |(own, view): &(String, TensorView)| fitted(own, (view.dtype, self.model.files.read(own)?), *dtype);
        if let [part] = &parts[..]
            && part.1.cut.is_contiguous()
        {
            return read(part);
        }
        let mut whole = vec![0; shape.iter().product::<usize>() * dtype.bytes()];
        for part in parts {
            part.1.cut.scatter(&read(part)?, &part.1.shape, dtype.bytes(), &mut whole);
        }
        Ok(whole)
    }
}
