// The OpenAPI document as a page: every path, what it takes and what it answers.

const made = (tag, text, ...children) => {
  const node = document.createElement(tag);
  node.textContent = text;
  node.append(...children);
  return node;
};

function kind(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.anyOf) return [...new Set(schema.anyOf.map(kind))].filter((name) => name !== "null").join(" | ");
  return schema.type === "array" ? `${kind(schema.items || {})}[]` : schema.type || "any";
}

function fields(schema) {
  const table = made("table", "", made("tr", "", made("th", "Field"), made("th", "Type"), made("th", "")));
  for (const [name, field] of Object.entries(schema.properties || {})) {
    const label = (schema.required || []).includes(name) ? `${name} *` : name;
    table.append(made("tr", "", made("td", label), made("td", kind(field)), made("td", field.description || "")));
  }
  const scroll = made("div", "", table);
  scroll.className = "scroll";
  return scroll;
}

const { paths, components } = await (await fetch("/openapi.json")).json();
for (const [path, methods] of Object.entries(paths)) {
  for (const [method, operation] of Object.entries(methods)) {
    const body = operation.requestBody?.content["application/json"].schema;
    const details = made("details", "", made("summary", `${method.toUpperCase()} ${path}`));
    details.append(made("p", operation.description || operation.summary || ""));
    if (body) details.append(fields(body.$ref ? components.schemas[kind(body)] : body));
    details.append(made("p", `Answers: ${Object.keys(operation.responses).join(", ")}`));
    document.getElementById("paths").append(details);
  }
}
